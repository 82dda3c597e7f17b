"""Removing a cluster, whole or half made, ours or left by a process that crashed."""

from __future__ import annotations

import contextlib
import shutil

from bench.cluster import network, state
from bench.cluster.layout import NETNS_ETC, RUN_ROOT
from bench.cluster.processes import end_all

__all__ = ["known", "remove_cluster", "remove_orphans"]


def known() -> set[str]:
    """Every cluster of which anything is left on this machine."""
    return set(state.all_names()) | set(network.leftovers())


def remove_cluster(name: str) -> None:
    """Ends the processes inside a cluster's namespaces and removes namespaces and files. Nothing there is fine.

    Whatever still carries the cluster's name is found, not only what the state file speaks of; that file goes last, so
    a teardown that is cut short can be repeated.
    """
    namespaces = network.leftovers().get(name, set())
    end_all(namespaces)
    for namespace in sorted(namespaces):
        network.remove(namespace)
        shutil.rmtree(NETNS_ETC / namespace, ignore_errors=True)
    with contextlib.suppress(OSError):  # somebody else's namespaces may have files there
        NETNS_ETC.rmdir()
    shutil.rmtree(RUN_ROOT / name, ignore_errors=True)


def remove_orphans() -> list[str]:
    """Removes the clusters whose owner has died or is not recorded, and returns their names.

    The caller holds the lock.
    """
    orphans = [name for name in sorted(known()) if _is_orphan(name)]
    for name in orphans:
        remove_cluster(name)
    return orphans


def _is_orphan(name: str) -> bool:
    found = state.load(name)
    return found is None or (found.owner_pid is not None and not found.owner_alive)
