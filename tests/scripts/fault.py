"""Training in which something goes wrong on rank 1; ``fault.py LIBRARY FAULT PHASE``, launched by harness/faults.py.

PHASE says when it goes wrong. Nothing depends on which call a rank waits in:

    start        before the first step
    agreement    step 0, before rank 1's backward: the others wait for it where ranks agree on the plan
    backward     a later step, between the layers of rank 1's backward
    waiting      a later step: rank 1 waits, because rank 0 comes late
    between      after a step
    plan         as agreement, in a step in which the plan is made anew
"""

import contextlib
import ctypes
import importlib
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

LIBRARY, FAULT, PHASE = sys.argv[1:4]
hvd = importlib.import_module(LIBRARY)

STEPS = 8
LATER_STEP = 2  # no plan is made in it
PLAN_STEP = 3
PACE = 0.05  # seconds that a step takes at least
LATE = 2.0
NOTES = os.environ.get("FAULT_NOTES")  # a file that tells the harness that it is time

slowed_by = 1.0


def say(what):
    print(f"rank {hvd.rank()} {what} @{time.time():.3f}", flush=True)


def report(kind, error, traceback):
    say(f"ends with {kind.__name__}: {error}".replace("\n", " "))
    sys.__excepthook__(kind, error, traceback)


def stop_for(seconds):
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def slow_down():
    global slowed_by
    slowed_by = 10.0


def fork():
    """Children as a data loader has them, one that leaves at once and one that runs Python's exit handlers."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    process = multiprocessing.get_context("fork").Process(target=lambda: torch.ones(100, 100).sum().item())
    process.start()
    process.join(30)
    assert process.exitcode == 0, process.exitcode


def limit_memory():
    """400 MB more than now. Of this step's rows the gathered ones need more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 400_000_000, resource.RLIM_INFINITY))


def bomb():
    raise ArithmeticError("the bomb went off")


def tell_harness():
    with open(NOTES, "w") as notes:
        notes.write("now")


FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segmentation-fault": lambda: ctypes.string_at(0),
    "raises": bomb,
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(3),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "stopped-20s": lambda: stop_for(20),
    "stopped-45s": lambda: stop_for(45),
    "slowed": slow_down,
    "forks": fork,
    "out-of-memory": limit_memory,
    "network": tell_harness,
}


class Bomb(torch.autograd.Function):
    """The identity, until its backward goes off."""

    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.armed:
            strike()
        return grad, None


def strike():
    say("struck")
    FAULTS.get(FAULT, lambda: None)()


def step_of(phase):
    return {"agreement": 0, "plan": PLAN_STEP}.get(phase, LATER_STEP)


def check_not_finite(model):
    """What one rank computed wrongly all ranks see."""
    seen = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p.grad).all())]
    say(f"sees {len(seen)} of {len(list(model.parameters()))} gradients that are not finite")


def train():
    torch.manual_seed(7)
    big = FAULT == "out-of-memory"
    width, inputs = (2048, 512) if big else (256, 64)
    first, second, third = torch.nn.Linear(inputs, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 10)
    model = torch.nn.ModuleDict({"first": first, "second": second, "third": third})
    options = {"policy": "sfb"} if LIBRARY == "poseidon_hvd" else {}
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)
    mine = hvd.rank() == 1
    if PHASE == "start" and mine:
        strike()
    for step in range(STEPS):
        time.sleep(PACE * slowed_by)
        optimizer.zero_grad()
        now = step == step_of(PHASE)
        here = now and mine
        rows = 8000 if now and big else 8
        h = Bomb.apply(torch.relu(second(torch.relu(first(torch.randn(rows, inputs))))), here and PHASE == "backward")
        loss = third(h).pow(2).mean()
        if here and PHASE in ("agreement", "plan"):
            strike()
        if here and FAULT in ("NaN", "Inf"):
            loss = loss * (math.nan if FAULT == "NaN" else math.inf)
        if now and PHASE == "waiting":
            if hvd.rank() == 0:
                time.sleep(LATE)
            elif mine:
                threading.Timer(LATE / 2, strike).start()
        if here and FAULT == "ends-early":
            say("struck")
            return
        if here and FAULT == "joins-early":
            say("struck")
            hvd.join()
            return
        loss.backward()
        if now and FAULT == "ends-in-flight":
            say("struck")
            hvd.allreduce(torch.ones(1), name="all have sent")  # the first to end shuts Horovod down
            return
        if here and FAULT == "caught":
            say("struck")
            with contextlib.suppress(RuntimeError):  # a second backward through a freed graph
                loss.backward()
        if FAULT in ("NaN", "Inf") and now:
            optimizer.synchronize()
            check_not_finite(model)
            with optimizer.skip_synchronize():
                optimizer.step()
            return
        optimizer.step()
        if here and PHASE == "between":
            strike()
    if FAULT == "joins-early":
        hvd.join()


def on_thread(function):
    """Where the exception hook of the main thread sees what happens."""
    failed = []

    def run():
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


hvd.init()
sys.excepthook = report
if hvd.rank() != 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, for a rank that has ended: each shall end by itself
if FAULT == "on-a-thread":
    say("struck")
    on_thread(train)
else:
    train()
say("reached the end")
