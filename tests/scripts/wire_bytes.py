"""Worker of test_wire_bytes: bytes per step by formula, by the engine and by the host's interface, for each policy."""

import json
import sys

import torch

import poseidon_hvd as hvd
from bench.cluster.counters import read_local

STEPS = 6
ROWS = 256
WIDTHS = (1024, 4096, 4096, 64)  # the last layer is cheaper as an allreduce


def formula(model, schemes):
    """Payload that a rank sends per step: 4 K (M+N) P (P-1)/P for factors, 8 M N (P-1)/P for allreduce (fp32)."""
    size = hvd.size()
    total = 0.0
    for name, p in model.named_parameters():
        if schemes[name] == "allreduce":
            total += 8 * p.numel() * (size - 1) / size
        elif p.dim() == 2:
            total += 4 * ROWS * size * sum(p.shape) * (size - 1) / size
    return total


def run(policy):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b) for a, b in zip(WIDTHS, WIDTHS[1:])]
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(), policy=policy
    )
    x = torch.randn(ROWS, WIDTHS[0])

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    step()
    before = optimizer.stats()
    hvd.barrier()
    sent = [read_local()[0]]
    for _ in range(STEPS):
        step()
        hvd.barrier()
        sent.append(read_local()[0])
    after = optimizer.stats()

    def engine(key):
        return sum(after["schemes"][s][key] - before["schemes"][s][key] for s in after["schemes"]) / STEPS

    schemes = {t["name"]: t["scheme"] for t in optimizer.plan()["tensors"]}
    # Of the step that was disturbed least: Horovod negotiates every millisecond, so a longer step sends more of that.
    least = min(end - begin for begin, end in zip(sent, sent[1:]))
    return {
        "formula": formula(model, schemes),
        "engine": engine("wire_bytes"),
        "horovod": engine("horovod_wire_bytes"),
        "interface": hvd.allgather_object(least, name=f"interface.{policy}"),
        "schemes": schemes,
    }


hvd.init()
result = {policy: run(policy) for policy in ("bytes", "allreduce", "sfb")}
if hvd.rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(result, file, indent=2)
