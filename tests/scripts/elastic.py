"""Elastic training whose hosts change while it runs; ``elastic.py FOLDER``. test_elastic.py launches it.

FOLDER/settings.json says which library, how many steps, and what happens in which of them: "changes" make the discovery
script, which prints FOLDER/hosts, answer something else until there are "size" ranks; "deaths" end a rank behind
backward. Rank 0 leaves a line per step in FOLDER/journal.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from harness.elastic import SEED, batch, build, loss_of, sgd

FOLDER = Path(sys.argv[1])
SETTINGS = json.loads((FOLDER / "settings.json").read_text())

hvd = importlib.import_module(SETTINGS["library"])


def wait_for_hosts(state):
    """Until Horovod has heard of the change and starts train() again on all ranks; this raises HostsUpdatedInterrupt
    then.
    """
    for change in SETTINGS["changes"]:
        if change["step"] == state.step and change["size"] != hvd.size():
            if hvd.rank() == 0:
                (FOLDER / "hosts.new").write_text(change["hosts"])
                os.replace(FOLDER / "hosts.new", FOLDER / "hosts")
            while True:
                state.commit()
                time.sleep(0.05)  # the launcher looks once a second


def die(step):
    if {"step": step, "size": hvd.size(), "rank": hvd.rank()} in SETTINGS["deaths"]:
        os._exit(1)


def note(state, loss):
    """Checks that all ranks have the same parameters, and writes the step down."""
    mean = hvd.allreduce(loss.detach().double(), name="loss").item()
    flat = torch.cat([p.detach().reshape(-1) for p in state.model.parameters()])
    everywhere = hvd.allgather(flat[None], name="parameters")
    assert bool((everywhere == everywhere[0]).all()), "ranks differ"
    if hvd.rank() != 0:
        return
    entry = {"step": state.step, "size": hvd.size(), "loss": mean}
    if hasattr(state.optimizer, "plan"):
        plan, stats = state.optimizer.plan(), state.optimizer.stats()
        entry.update(plan_size=plan and plan["size"], steps=stats["steps"], factored=stats["schemes"]["sfb"]["tensors"])
    with open(FOLDER / "journal", "a") as journal:
        journal.write(json.dumps(entry) + "\n")


@hvd.elastic.run
def train(state):
    while state.step < SETTINGS["steps"]:
        wait_for_hosts(state)
        state.optimizer.zero_grad()
        loss = loss_of(state.model(batch(state.step, hvd.rank())))
        loss.backward()
        die(state.step)
        state.optimizer.step()
        note(state, loss)
        state.step += 1
        if state.step % SETTINGS["steps_per_commit"] == 0:
            state.commit()


hvd.init()
torch.set_num_threads(1)
torch.manual_seed(SEED + hvd.rank())  # who comes later has other weights, until it gets those of rank 0
model = build()
optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
train(hvd.elastic.TorchState(model, optimizer, step=0))
