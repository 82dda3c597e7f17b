"""Elastic training for tests: what is trained, its launch, and the same training replayed from its journal in one
process, in float64.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness.launch import TESTS, Launched, launch

SEED = 11
FEATURES = 12


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batch(step: int, rank: int) -> torch.Tensor:
    """Differs between steps and ranks, and so does its number of rows between ranks."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4 + rank, FEATURES, generator=generator)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y - 1).pow(2).mean()


def prepare(folder: Path, hosts: str, library: str, **settings) -> list[str]:
    """Writes what scripts/elastic.py reads; returns horovodrun's options."""
    (folder / "hosts").write_text(hosts)
    discover = folder / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat '{folder}/hosts'\n")
    discover.chmod(0o755)
    (folder / "settings.json").write_text(
        json.dumps({"library": library, "changes": [], "deaths": [], "steps_per_commit": 1, **settings})
    )
    return ["--min-np", "1", "--max-np", "3", "--host-discovery-script", str(discover)]


def launch_elastic(folder: Path, library: str, *, limit: float) -> Launched:
    """Two ranks; the last one dies with factors in flight, and a new one comes two steps later.

    Two names of this machine stand for two hosts: nobody uses that of the dead one again.
    """
    options = prepare(
        folder,
        "localhost:1\n127.0.0.1:1\n",
        library,
        steps=9,
        steps_per_commit=3,
        deaths=[{"step": 4, "size": 2, "rank": 1}],
        changes=[{"step": 6, "size": 2, "hosts": "localhost:2\n127.0.0.1:2\n"}],
    )
    return launch(
        2,
        [str(TESTS / "scripts" / "elastic.py"), str(folder)],
        seconds=limit,
        env={"POSEIDON_POLICY": "sfb"},
        options=[*options, "--network-interface", "lo"],
    )


def replay(journal: Sequence[dict[str, Any]]) -> None:
    """Asserts that each step's loss is that of the mean over its ranks, from the state that the step before left.

    A step that is there twice was thrown away the first time: it starts again from the state that it started from then.
    """
    torch.manual_seed(SEED)
    model = build().double()
    optimizer = sgd(model.parameters())
    began: dict[int, Any] = {}
    for entry in journal:
        step, size = entry["step"], entry["size"]
        if step in began:
            state, momentum = copy.deepcopy(began[step])
            model.load_state_dict(state)
            optimizer.load_state_dict(momentum)
        began[step] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.zero_grad()
        loss = sum(loss_of(model(batch(step, rank).double())) for rank in range(size)) / size
        loss.backward()
        optimizer.step()
        assert abs(entry["loss"] - loss.item()) < 1e-5 * loss.item(), (entry, loss.item())
