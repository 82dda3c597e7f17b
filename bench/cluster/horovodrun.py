"""The command line of an unmodified horovodrun for a cluster."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.cluster.errors import ClusterError
from bench.cluster.layout import HOST_INTERFACE, SSH_PORT, Layout
from bench.cluster.sshd import identity_file

__all__ = ["command"]


def command(layout: Layout, argv: Sequence[str], *, np: int, options: Sequence[str] = ()) -> list[str]:
    """The launch of ``argv`` with one rank on each of the first ``np`` hosts.

    Args:
        layout: of the cluster.
        argv: the training command.
        np: number of ranks.
        options: more options of horovodrun, put before the training command.
    """
    if not 1 <= np <= layout.hosts:
        raise ClusterError(f"cannot put {np} ranks on {layout.hosts} hosts: one rank a host, 1 to {layout.hosts}")
    if not argv:
        raise ClusterError("no training command given")
    slots = ",".join(f"{host}:1" for host in layout.host_names[:np])
    return [
        *(_find(), "-np", str(np), "-H", slots, "-p", str(SSH_PORT), "--ssh-identity-file", str(identity_file(layout))),
        # Its cache, in the home directory, would believe in the hosts of an earlier cluster.
        *("--network-interfaces", HOST_INTERFACE, "--disable-cache", "--gloo"),
        *options,
        *argv,
    ]


def _find() -> str:
    beside = Path(sys.executable).with_name("horovodrun")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("horovodrun")
    if found is None:
        raise ClusterError("no horovodrun beside this Python nor in PATH: build Horovod with tools/build_horovod.py")
    return found
