"""Much of the same: nothing may grow.

``endurance.py LIBRARY steps|wraps|restarts COUNT``, launched by harness/faults.py.
"""

import gc
import importlib
import sys
import time

import psutil
import torch

LIBRARY, WHAT, COUNT = sys.argv[1], sys.argv[2], int(sys.argv[3])
hvd = importlib.import_module(LIBRARY)

MOST_MB = 24  # that malloc may keep


def say(what):
    print(f"rank {hvd.rank()} {what} @{time.time():.3f}", flush=True)


def report(kind, error, traceback):
    say(f"ends with {kind.__name__}: {error}".replace("\n", " "))
    sys.__excepthook__(kind, error, traceback)


def taken():
    """Megabytes, threads and descriptors."""
    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss / 1e6, process.num_threads(), process.num_fds()


def wrap(model):
    options = {"policy": "sfb"} if LIBRARY == "poseidon_hvd" else {}
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), **options)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 16)).pow(2).mean().backward()
    optimizer.step()


def build():
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def restart():
    hvd.shutdown()
    hvd.init()
    model = build()
    optimizer = wrap(model)
    for _ in range(2):
        step(model, optimizer)


hvd.init()
sys.excepthook = report
torch.manual_seed(1)
model = build()
optimizer = wrap(model)
say("struck")
warm_up = max(1, COUNT // 10)
# Several looks, because Horovod's start may leave a connection to be made later.
looks = {warm_up + i * max(1, warm_up // 5) for i in range(5)}
before = (0, 0, 0)
for i in range(COUNT):
    if i in looks:
        before = tuple(map(max, before, taken()))
    if WHAT == "steps":
        step(model, optimizer)
    elif WHAT == "restarts":
        restart()
    else:
        optimizer = wrap(model)
        if i % 10 == 0:
            step(model, optimizer)
hvd.barrier()  # the first rank to end shuts Horovod down on all
after = taken()
hvd.barrier()
say(f"took {before} and then {after}")
assert after[0] < before[0] + MOST_MB, f"memory grew from {before[0]:.0f} to {after[0]:.0f} MB"
assert after[1] <= before[1] and after[2] <= before[2], f"threads and descriptors went from {before[1:]} to {after[1:]}"
say("reached the end")
