"""Trains real models on synthetic data with several systems in turn and tells what each step costs.

    python -m bench.train --model alexnet --hosts 4 --rate 200mbit --steps 5 --systems none,horovod,ddp,poseidon-time
    python -m bench.train --model mlp --local --np 2           # loopback, no shaping: says nothing about bandwidth

Brings up the virtual cluster and runs itself on every host under horovodrun. A step is forward, backward,
synchronization and SGD; its time is that of the slowest rank. Gradients of exact systems are compared to Horovod's
before anything is timed. See docs/benchmarks.md.
"""

import argparse
import pathlib
from typing import Any

from bench import launch, steps

REFERENCES = ("none", "horovod", "ddp")


def parse_args():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.train", description=__doc__, formatter_class=formatter)
    parser.add_argument(
        "--model", default="mlp", help="alexnet, mlp, resnet50, transformer or dlrm (default: %(default)s)"
    )
    parser.add_argument(
        "--systems", default="none,horovod,ddp,poseidon-time", help="in the order of each round (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=7, help="timed rounds, one step of each system (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=0, help="samples per rank and step (default: the model's own)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="shrinks batch, pictures and sequences, no parameters, for smoke runs"
    )
    parser.add_argument("--timeline", action="store_true", help="print where a step's time went")
    parser.add_argument(
        "--result", help="name of the files in --directory (default: train-MODEL-HOSTSxRATE); empty: write none"
    )
    launch.add_options(parser)
    return parser.parse_args()


def title(measured: dict[str, Any]) -> str:
    s = measured["settings"]
    network = "loopback, no shaping" if s["local"] else s["rate"]
    return (
        f"{s['model']}, {measured['parameters'] / 1e6:.1f}M parameters, {measured['ranks']} ranks, "
        f"{s['rows']} rows each, {network}"
    )


def work(folder: pathlib.Path) -> None:
    """One rank: builds, checks, times; rank 0 answers."""
    args = launch.settings_of(folder)
    from bench import systems

    model, rows, loss_of = steps.begin(args)
    built = [systems.BUILDERS[name](systems.share_parameters(model)) for name in args.systems.split(",")]
    measured = steps.measure(built, model, loss_of, args, REFERENCES)
    if measured is not None:
        settings = {key: getattr(args, key) for key in ("model", "systems", "local", "steps", "scale", "threads")}
        settings.update(rows=rows, hosts=1 if args.local else args.hosts, rate="loopback" if args.local else args.rate)
        launch.answer(folder, {"benchmark": "train", "settings": settings, **measured})
    systems.close()


def validate(args) -> None:
    """Before anything is launched: names that do not exist."""
    from bench import models, systems

    try:
        models.build(args.model)
    except ValueError as error:
        raise SystemExit(f"bench.train: {error}") from None
    for name in args.systems.split(","):
        if name not in systems.BUILDERS:
            raise SystemExit(f"bench.train: {name!r} is not a system. Choose from {', '.join(systems.BUILDERS)}.")


def main() -> None:
    args = parse_args()
    if args.worker is not None:
        work(args.worker)
        return
    validate(args)
    measured = launch.measured_by_ranks("bench.train", args)
    name = f"train-{args.model}-{launch.where(args)}" if args.result is None else args.result
    steps.publish(args, measured, title(measured), name)


if __name__ == "__main__":
    main()
