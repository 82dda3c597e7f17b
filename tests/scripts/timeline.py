"""One rank: some steps with the dense method argv[1], all allreduced.

HOROVOD_TIMELINE names the file that rank 0 leaves.
"""

import sys

import torch

import poseidon_hvd as hvd

STEPS = 6


def main():
    hvd.init()
    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), policy="allreduce", dense=sys.argv[1])
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    hvd.shutdown()


main()
