"""Published data-parallel experiments as scale models.

    python -m bench.replay --network vgg19-22k --hosts 16 --rate 10gbit-equivalent
    python -m bench.replay --network tiny --local --hosts 2      # no cluster, no shaping: says nothing about bandwidth

Prints speedups over one node beside the published ones and writes bench/results/replay-<network>-<hosts>.json and .png.
"""

import argparse
import os
import pathlib
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench import results
from bench.cluster import ClusterError, available
from bench.replay import launch, networks, report
from bench.replay.schedule import Scale, flops_per_second, link_bits, schedule

SYSTEMS = ("none", "horovod", "ddp", "poseidon-bytes", "poseidon-bytes-charged", "poseidon-allreduce")
DEFAULT_SYSTEMS = "none,horovod,ddp,poseidon-bytes"


def parse_args():
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=list(networks.NETWORKS), default="vgg19-22k")
    parser.add_argument("--hosts", "-np", type=int, default=16, help="ranks, one a host (16)")
    parser.add_argument(
        "--rate", help="link of the modelled cluster, such as 10gbit-equivalent; default: the published experiment's"
    )
    parser.add_argument("--scale", type=int, default=4, metavar="S", help="features and rows are divided by S (4)")
    parser.add_argument("--dilation", type=float, default=8.0, metavar="D", help="the clock runs D times slower (8)")
    parser.add_argument("--systems", default=DEFAULT_SYSTEMS, help=f"of {','.join(SYSTEMS)} ({DEFAULT_SYSTEMS})")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system (3)")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn (3)")
    parser.add_argument(
        "--timeline", action="store_true", help="afterwards some steps of ours under Horovod's timeline"
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds (1800)")
    parser.add_argument("--local", action="store_true", help="ranks on loopback instead of the virtual cluster")
    parser.add_argument("--result", help="name of the files; empty: none; default: replay-<network>-<hosts>")
    parser.add_argument("--output", type=pathlib.Path, help="their folder (bench/results)")
    args = parser.parse_args()
    unknown = sorted(set(args.systems.split(",")) - set(SYSTEMS))
    if unknown:
        parser.error(f"unknown systems {', '.join(unknown)}: of {', '.join(SYSTEMS)}")
    return args


def main():
    args = parse_args()
    network, scale = networks.get(args.network), Scale(args.scale, args.dilation)
    bits = None if args.local else link_bits(args.rate or network.link)
    if not args.local:
        usable, reason = available()
        if not usable:
            raise SystemExit(f"{reason}. --local runs without a cluster, and says nothing about bandwidth.")
    spec = {
        "network": network.name,
        "size": scale.size,
        "dilation": scale.dilation,
        "systems": args.systems.split(","),
        "rounds": args.rounds,
        "steps": args.steps,
        "timeline": args.timeline,
    }
    model_bits = None if bits is None else round(scale.rate(bits))
    load = os.getloadavg()[0]
    try:
        raw = launch.measure(spec, hosts=args.hosts, bits=model_bits, local=args.local, timeout=args.timeout)
    except ClusterError as error:
        raise SystemExit(str(error)) from None
    found = report.evaluate(network, scale, args.hosts, bits, raw)
    link = "loopback, unshaped" if bits is None else f"{bits / 1e9:g} Gbit/s links as {model_bits / 1e6:.4g} Mbit/s"
    title = f"{network.name}, {args.hosts} hosts, {link} (s = {scale.size}, d = {scale.dilation:g})"
    report.print_tables(title, network, args.hosts, found, raw["tails"])
    if args.result == "":
        return
    name = args.result or f"replay-{network.name}-{args.hosts}"
    path = results.write(
        name,
        {
            # The path of this file on some machine is nobody's business.
            "environment": {**results.environment(), "command": " ".join(["python -m bench.replay", *sys.argv[1:]])},
            "settings": {**spec, "hosts": args.hosts, "rate": None if bits is None else f"{bits / 1e9:g}gbit"},
            "seconds_per_step": {name: entry["step_seconds"] for name, entry in found.items()},
            "samples": {name: entry.pop("samples") for name, entry in found.items()},
            "network": {
                "name": network.name,
                "batch": network.batch,
                "samples_per_second": network.samples_per_second,
                "rate_source": network.rate_source,
                "step_seconds": schedule(network, Scale(1, 1)).step_seconds,
                "flops_per_second": flops_per_second(network),
            },
            "link_bits": bits,
            "model_link_bits": model_bits,
            "load_before": load,
            "load_averages_while_measuring": raw["load_averages"],
            "horovod_environment": raw["horovod_environment"],
            "systems": found,
            "published": [vars(p) for p in network.published],
            "schemes": raw["schemes"],
            "tails": raw["tails"],
        },
        args.output,
    )
    report.draw(path.with_suffix(".png"), title, network, args.hosts, found)
    print(f"written: {path.parent.name}/{path.stem}.json and .png")


if __name__ == "__main__":
    main()
