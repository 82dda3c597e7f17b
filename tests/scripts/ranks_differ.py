"""Rank 1 builds or wraps something else than the others; ``ranks_differ.py LIBRARY CASE``, from harness/faults.py."""

import importlib
import sys
import time

import torch
from torch import nn

LIBRARY, CASE = sys.argv[1:3]
hvd = importlib.import_module(LIBRARY)


def say(what):
    print(f"rank {hvd.rank()} {what} @{time.time():.3f}", flush=True)


def report(kind, error, traceback):
    say(f"ends with {kind.__name__}: {error}".replace("\n", " "))
    sys.__excepthook__(kind, error, traceback)


def other(case):
    """Whether this rank is the one that differs in this way."""
    return hvd.rank() == 1 and case == CASE


hvd.init()
sys.excepthook = report
torch.manual_seed(7)
width = 48 if other("shape") else 64
layers = [nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 8)]
if CASE == "sparse":
    layers[:0] = [nn.Embedding(50, 32, sparse=other("sparse"))]
model = nn.Sequential(*layers[:3] if other("fewer-layers") else layers)
dtype = torch.float64 if other("dtype") else torch.float32
model.to(dtype)
if other("requires-grad") or CASE == "unfreezing":
    model[2].requires_grad_(False)
names = [(("its." if other("names") else "") + name, p) for name, p in model.named_parameters()]
parameters = list(model.parameters())[::-1] if other("order") else model.parameters()
options = {"policy": "bytes" if other("policy") else "sfb"} if LIBRARY == "poseidon_hvd" else {}
if other("op"):
    options["op"] = hvd.Sum
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.05), names, **options)
say("struck")
for step in range(5):
    if other("unfreezing") and step == 3:
        model[2].requires_grad_(True)
    optimizer.zero_grad()
    inputs = torch.randint(50, (8,)) if CASE == "sparse" else torch.randn(8, 32, dtype=dtype)
    model(inputs).pow(2).mean().backward()
    optimizer.step()
say("reached the end")
