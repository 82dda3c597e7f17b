"""Training on ranks that are threads: ``PYTHONPATH=tests python tests/scripts/ranks_as_threads.py``;
harness/world.py.
"""

import time

import torch
from harness.world import World

import poseidon_hvd as hvd


def main(rank):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), policy="sfb")
    for step in range(4):
        optimizer.zero_grad()
        model(rank.random(step, 8, 12).float()).square().sum().backward()
        optimizer.step()
        rank.assert_same_everywhere(model.parameters(), f"parameters after step {step}")
    return {tensor["name"]: tensor["scheme"] for tensor in optimizer.plan()["tensors"]}


if __name__ == "__main__":
    for size in (2, 4):
        begin = time.perf_counter()
        with World(size, max_delay=0.0002) as world:
            schemes = world.run(main)
        milliseconds = (time.perf_counter() - begin) * 1e3
        print(f"{size} ranks, {milliseconds:.0f} ms, {len(world.executed())} operations: {schemes[0]}")
