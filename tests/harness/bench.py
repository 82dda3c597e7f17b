"""Runs a bench's command line."""

import subprocess
import sys

from harness.launch import TESTS, environment


def bench(module: str, *arguments, expect: int = 0) -> str:
    """``python -m bench.<module> arguments...`` in the repository's root; what it printed."""
    command = [sys.executable, "-m", f"bench.{module}", *map(str, arguments)]
    done = subprocess.run(command, cwd=TESTS.parent, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr
