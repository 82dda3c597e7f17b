"""One fully connected layer: sufficient factors against allreduce, and where the time goes.

    horovodrun -np 2 python -m bench.sfb_layer [--features 4096 --rows 32 --steps 15]

Every system does the same steps in turn, so that the machine's mood hits all alike. A step is forward, backward (input
gradient included) and synchronize(); a step's time is that of the slowest rank. Correct gradients are checked before
anything is timed.
"""

import argparse
import copy
import time

import numpy as np
import torch

import poseidon_hvd as hvd
from bench import results, systems

NAMES = ("none", "horovod", "ddp", "poseidon-allreduce", "poseidon-sfb")
STAGES = ("pack", "queue", "wire", "handoff", "rebuild", "waited")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=4096, help="in and out features of the layer")
    parser.add_argument("--rows", type=int, default=32, help="rows per rank and step")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each system")
    parser.add_argument("--result", default="sfb_layer", help="name of the file in bench/results; empty: none")
    return parser.parse_args()


def main():
    args = parse_args()
    hvd.init()
    torch.manual_seed(0)
    layer = torch.nn.Linear(args.features, args.features)
    torch.manual_seed(1 + hvd.rank())
    x = torch.randn(args.rows, args.features, requires_grad=True)
    d = torch.randn(args.rows, args.features) / args.rows

    def loss_of(forward):
        x.grad = None
        return (forward(x) * d).sum()

    built = [systems.BUILDERS[name](copy.deepcopy(layer)) for name in NAMES]
    for _ in range(2):  # the first step of ours only observes
        for system in built:
            system.run(loss_of)
    check(built)

    seconds = {name: [] for name in NAMES}
    before = {s.name: s.optimizer.stats() for s in built if hasattr(s.optimizer, "stats")}
    for _ in range(args.steps):
        for system in built:
            systems.wait_for_all()
            start = time.perf_counter()
            system.run(loss_of)
            seconds[system.name].append(time.perf_counter() - start)
    slowest = {
        name: np.max(hvd.allgather_object(times, name=f"bench.{name}"), axis=0) for name, times in seconds.items()
    }
    stages = {s.name: stage_profile(s.optimizer.stats(), before[s.name], args.steps) for s in built if s.name in before}
    if hvd.rank() == 0:
        publish(args, slowest, stages)


def check(built):
    """All systems agree on the gradient to rounding."""
    expected = next(s for s in built if s.name == "horovod").model.weight.grad
    for system in built:
        if system.name == "none":
            continue
        error = ((system.model.weight.grad - expected).norm() / expected.norm()).item()
        if error > 1e-5:
            raise SystemExit(f"{system.name}: gradient differs from Horovod's by {error:.1e}; nothing is timed.")


def stage_profile(after, before, steps):
    """Milliseconds per step of every stage, and bytes sent per step, of the scheme that carried the layer."""
    name = "sfb" if after["schemes"]["sfb"]["collectives"] > before["schemes"]["sfb"]["collectives"] else "allreduce"
    a, b = after["schemes"][name], before["schemes"][name]
    profile = {stage: 1e3 * (a[f"{stage}_seconds"] - b[f"{stage}_seconds"]) / steps for stage in STAGES}
    return {"scheme": name, "wire_bytes": (a["wire_bytes"] - b["wire_bytes"]) / steps, "milliseconds": profile}


def publish(args, slowest, stages):
    from rich.console import Console
    from rich.table import Table

    dense = 2 * 4 * (args.features + 1) * args.features * (hvd.size() - 1) / hvd.size()
    bytes_sent = {
        name: stages[name]["wire_bytes"] if name in stages else 0.0 if name == "none" else dense for name in NAMES
    }
    timing = {name: results.summary(times) for name, times in slowest.items()}
    table = Table(
        title=f"Linear {args.features} x {args.features}, {args.rows} rows per rank, {hvd.size()} ranks on loopback"
    )
    for column in ("system", "ms per step", "p10", "p90", "of horovod", "MB sent per rank"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for name in NAMES:
        t = timing[name]
        ratios = slowest[name] / slowest["horovod"]  # step by step: neighbours in time
        table.add_row(
            name,
            f"{1e3 * t['median']:.1f}",
            f"{1e3 * t['p10']:.1f}",
            f"{1e3 * t['p90']:.1f}",
            f"{np.median(ratios):.2f}",
            f"{bytes_sent[name] / 1e6:.2f}",
        )
    profile = Table(title="Stages of an exchange on rank 0, ms per step (stages of a step may overlap with computing)")
    for column in ("system", *STAGES):
        profile.add_column(column, justify="left" if column == "system" else "right")
    for name, stage in stages.items():
        profile.add_row(name, *(f"{stage['milliseconds'][s]:.2f}" for s in STAGES))
    console = Console(width=110)
    console.print(table)
    console.print(profile)
    if args.result:
        path = results.write(
            args.result,
            {
                "settings": vars(args),
                "ranks": hvd.size(),
                "seconds_per_step": timing,
                "wire_bytes_per_step": bytes_sent,
                "ratio_to_horovod": {name: float(np.median(slowest[name] / slowest["horovod"])) for name in NAMES},
                "stages": stages,
            },
        )
        console.print(f"written: {path.relative_to(results.RESULTS.parent.parent)}")


if __name__ == "__main__":
    main()
