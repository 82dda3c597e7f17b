"""``python -m bench.cluster``: see docs/cluster.md."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from bench.cluster import signals, state, teardown
from bench.cluster.cluster import Cluster
from bench.cluster.errors import ClusterError
from bench.cluster.requirements import available
from bench.cluster.shaping import format_rate

__all__ = ["main"]

_EXIT_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 2 for an error of the cluster, or that of the command that
    was run.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.handler(options)
    except ClusterError as error:
        print(f"bench.cluster: {error}", file=sys.stderr)
        return _EXIT_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description="N hosts on one machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default="default", help="of the cluster (default: %(default)s)")
    timed = argparse.ArgumentParser(add_help=False)
    timed.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="end the command after S seconds (default: %(default)s)",
    )

    up = commands.add_parser("up", parents=[named], help="make a cluster; it stays up until 'down'")
    up.add_argument("--hosts", type=int, default=4)
    up.add_argument(
        "--rate", default="unshaped", help="of each direction of each link: 200mbit, 1gbit, unshaped (default)"
    )
    up.add_argument("--hold", action="store_true", help="stay in the foreground and take it down at the end")
    up.set_defaults(handler=_up)

    down = commands.add_parser("down", parents=[named], help="take a cluster down, or what a crash left of it")
    down.add_argument("--orphans", action="store_true", help="instead: every cluster whose owner has died")
    down.add_argument("--force", action="store_true", help="also while another process holds it")
    down.set_defaults(handler=_down)

    rate = commands.add_parser("rate", parents=[named], help="change the rate of every link of a cluster that is up")
    rate.add_argument("rate")
    rate.set_defaults(handler=_rate)

    run_on = commands.add_parser("exec", parents=[named, timed], help="run a command on one host")
    run_on.add_argument("host")
    _add_command(run_on)
    run_on.set_defaults(handler=_exec)

    run = commands.add_parser(
        "run", parents=[named, timed], help="run a training command on every host with horovodrun"
    )
    run.add_argument("--np", type=int, help="ranks, one a host (default: all hosts)")
    _add_command(run)
    run.set_defaults(handler=_run)

    status = commands.add_parser("status", help="show the clusters on this machine")
    status.set_defaults(handler=_status)
    return parser


def _add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")


def _up(options: argparse.Namespace) -> int:
    cluster = Cluster(hosts=options.hosts, rate=options.rate, name=options.name)
    with cluster:
        print(f"{cluster.name}: {cluster.hosts[0]} to {cluster.hosts[-1]}, {cluster.rate}", flush=True)
        if options.hold:
            signal.pause()
        else:
            cluster.detach()
    return 0


def _down(options: argparse.Namespace) -> int:
    if not available()[0]:
        raise ClusterError(available()[1])
    with signals.deferred(), state.locked():
        if options.orphans:
            names = teardown.remove_orphans()
            print(f"removed: {', '.join(names) or 'nothing was left'}")
            return 0
        found = state.load(options.name)
        if found is not None and found.owner_alive and not options.force:
            raise ClusterError(f"process {found.owner_pid} holds {options.name!r}: end that process, or use --force")
        was_there = options.name in teardown.known()
        teardown.remove_cluster(options.name)
    print(f"removed: {options.name if was_there else 'nothing was left'}")
    return 0


def _rate(options: argparse.Namespace) -> int:
    Cluster.attach(options.name).set_rate(options.rate)
    return 0


def _exec(options: argparse.Namespace) -> int:
    cluster = Cluster.attach(options.name)
    return cluster.exec(options.host, _command(options), timeout=options.timeout, stdin=None, capture=False).returncode


def _run(options: argparse.Namespace) -> int:
    cluster = Cluster.attach(options.name)
    return cluster.run(_command(options), np=options.np, timeout=options.timeout, capture=False).returncode


def _command(options: argparse.Namespace) -> list[str]:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ClusterError("no command given: put it after --")
    return command


def _status(options: argparse.Namespace) -> int:
    ok, reason = available()
    print(f"available: {'yes' if ok else reason}")
    for name in sorted(teardown.known()) if ok else ():
        found = state.load(name)
        if found is None or not found.usable:
            print(f"{name}: left over; python -m bench.cluster down --name {name}")
            continue
        holder = f"held by process {found.owner_pid}" if found.owner_pid is not None else "stands by itself"
        cluster = Cluster.attach(name)
        print(f"{name}: {len(cluster.hosts)} hosts, {cluster.rate}, {holder}")
        counters, rates = cluster.byte_counters(), cluster.shaped_rates()
        for host in cluster.hosts:
            sent, received = counters[host]
            limits = "/".join(map(format_rate, rates[host]))
            print(f"  {host}  {cluster.address(host):<12}  {limits}  sent {sent}  received {received} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
