"""Ranks that fail, or end, in the middle of training; ``failure.py WHAT``. test_failures.py looks at how the others end."""

import os
import sys
import time

import torch

import poseidon_hvd as hvd

WHAT = sys.argv[1]
FAILING_RANK = 1
FAILING_STEP = 2  # no plan is made in it


class Bomb(torch.autograd.Function):
    """The identity, until its backward goes off."""

    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.armed:
            say("raising")
            raise ArithmeticError("the bomb went off")
        return grad, None


def say(what):
    print(f"rank {hvd.rank()} {what} {time.time():.3f}", flush=True)


def report(kind, error, traceback):
    say(f"dies of {kind.__name__}: {error}".replace("\n", " "))
    sys.__excepthook__(kind, error, traceback)


hvd.init()
sys.excepthook = report
torch.manual_seed(7)
first, second, third = torch.nn.Linear(64, 256), torch.nn.Linear(256, 256), torch.nn.Linear(256, 10)
model = torch.nn.ModuleList([first, second, third])
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), policy="sfb")
me = hvd.rank() == FAILING_RANK
when = 0 if WHAT == "raise-at-once" else FAILING_STEP

for step in range(6):
    optimizer.zero_grad()
    now = me and step == when
    if now and WHAT == "fewer-steps":
        say("ends early")
        break
    if now and WHAT == "join":
        hvd.join()
        say("joined")
        break
    x = torch.randn(8, 64)
    h = torch.relu(first(x))
    h = Bomb.apply(torch.relu(second(h)), now and WHAT.startswith("raise"))
    loss = third(h).pow(2).mean()
    loss.backward()
    if now and WHAT == "crash":
        say("crashes")
        os._exit(3)
    if step == when and WHAT == "end-in-flight":
        hvd.allreduce(torch.ones(1), name="all have sent")  # or the first one to end would shut Horovod down under the others
        break  # on all ranks, after backward and before step
    if step == when and WHAT == "caught" and me:
        try:
            loss.backward()
        except RuntimeError:
            say("goes on")
    optimizer.step()
if WHAT == "join" and not me:
    hvd.join()
say("reached the end")
