"""Logging in from one host to another: one key pair, one sshd per host, nothing of the machine's own ssh set-up
touched.

``ip netns exec`` binds /etc/netns/NAMESPACE/{hosts,ssh} over /etc, so inside a host plain ``ssh host1`` finds port, key
and known hosts.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from pathlib import Path

from bench.cluster.errors import ClusterError
from bench.cluster.layout import SSH_PORT, Layout
from bench.cluster.processes import inside

__all__ = ["find_sshd", "identity_file", "start_daemon", "wait_listening", "write_files"]

# sshd has its privilege separation directory compiled in; Debian's boot script makes it, and here none may have run.
_PRIVILEGE_SEPARATION_DIR = Path("/run/sshd")
_POLL_SECONDS = 0.01


def find_sshd() -> str | None:
    """Absolute path of sshd, which refuses to start by any other; it is often outside a user's PATH."""
    return shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


def identity_file(layout: Layout) -> Path:
    return layout.run_dir / "identity"


def write_files(layout: Layout) -> None:
    """Writes keys, configurations, known hosts and hosts files; the run directory exists and is private to root."""
    run = layout.run_dir
    host_key = _make_key(run / "host_key")
    (run / "authorized_keys").write_text(_make_key(identity_file(layout)) + "\n")
    names = [f"[{name}]:{SSH_PORT}" for host in layout.host_names for name in (host, layout.address(host))]
    (run / "known_hosts").write_text(f"{','.join(names)} {host_key}\n")
    for host in layout.host_names:
        (run / f"sshd_config.{host}").write_text(_daemon_config(layout, host))
        etc = layout.etc_dir(host)
        (etc / "ssh").mkdir(parents=True)
        (etc / "ssh" / "ssh_config").write_text(_client_config(layout))
        (etc / "hosts").write_text(_hosts_file(layout, host))


def start_daemon(layout: Layout, host: str) -> subprocess.Popen[bytes]:
    """Starts a host's sshd in a session of its own, so that an interrupt typed at the terminal does not reach it."""
    sshd = find_sshd()
    assert sshd is not None, "requirements were checked"
    _PRIVILEGE_SEPARATION_DIR.mkdir(mode=0o755, exist_ok=True)
    command = [sshd, "-D", "-e", "-f", str(layout.run_dir / f"sshd_config.{host}")]
    with open(_log(layout, host), "wb") as log:
        return subprocess.Popen(
            inside(layout, host, command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def wait_listening(layout: Layout, host: str, daemon: subprocess.Popen[bytes], deadline: float) -> None:
    """Returns once the daemon accepts connections.

    Args:
        layout: of the cluster.
        host: whose daemon it is.
        daemon: from ``start_daemon``.
        deadline: on ``time.monotonic``'s clock.
    """
    packed = int.from_bytes(socket.inet_aton(layout.address(host)), "little")
    listening = f"{packed:08X}:{SSH_PORT:04X} 00000000:0000 0A"  # local address, remote address, state LISTEN
    while True:
        try:
            if listening in Path(f"/proc/{daemon.pid}/net/tcp").read_text():
                return
        except OSError:
            pass  # has ended: said below
        if daemon.poll() is not None or time.monotonic() > deadline:
            log = _log(layout, host).read_text(errors="replace").strip()
            raise ClusterError(f"sshd of {host} does not listen (exit status {daemon.returncode}): {log[-1000:]}")
        time.sleep(_POLL_SECONDS)


def _log(layout: Layout, host: str) -> Path:
    return layout.run_dir / f"sshd.{host}.log"


def _make_key(path: Path) -> str:
    """Makes a key pair and returns its public half, type and key only."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=30)
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


def _daemon_config(layout: Layout, host: str) -> str:
    options = {
        "ListenAddress": f"{layout.address(host)}:{SSH_PORT}",
        "HostKey": layout.run_dir / "host_key",
        "AuthorizedKeysFile": layout.run_dir / "authorized_keys",
        "AllowUsers": _user(),
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "UsePAM": "no",
        "UseDNS": "no",
        "PidFile": "none",
        "PrintMotd": "no",
        "PrintLastLog": "no",
        "AllowTcpForwarding": "no",
        "X11Forwarding": "no",
        "MaxStartups": 100,
    }
    return _config(options)


def _client_config(layout: Layout) -> str:
    options = {
        "Port": SSH_PORT,
        "User": _user(),
        "IdentityFile": identity_file(layout),
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": layout.run_dir / "known_hosts",
        "GlobalKnownHostsFile": "none",
        "UpdateHostKeys": "no",
        "BatchMode": "yes",
        "ConnectTimeout": 20,
    }
    return _config(options)


def _config(options: dict[str, object]) -> str:
    return "".join(f"{key} {value}\n" for key, value in options.items())


def _hosts_file(layout: Layout, host: str) -> str:
    """Horovod's gloo finds its address by resolving the machine's name, so here that name is the host's own address."""
    lines = ["127.0.0.1 localhost"]
    for other in layout.host_names:
        names = [other, socket.gethostname()] if other == host else [other]
        lines.append(f"{layout.address(other)} {' '.join(names)}")
    return "\n".join(lines) + "\n"


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name
