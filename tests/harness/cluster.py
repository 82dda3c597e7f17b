"""Tests that need more of the machine than every machine gives."""

import os

import pytest


def need(ok: bool, reason: str = "") -> None:
    """Skips the test unless ``ok``; a failure where POSEIDON_REQUIRE_CLUSTER=1, as in CI, so that nothing is skipped
    unseen.
    """
    if ok:
        return
    if os.environ.get("POSEIDON_REQUIRE_CLUSTER") == "1":
        pytest.fail(f"POSEIDON_REQUIRE_CLUSTER=1, but {reason}")
    pytest.skip(reason)
