"""Elastic training for tests: what is trained, and the same training replayed from its journal in one process, in float64."""

import copy
from typing import Any, Dict, Sequence

import torch

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


def replay(journal: Sequence[Dict[str, Any]]) -> None:
    """Asserts that each step's loss is that of the mean over its ranks, from the state that the step before left.

    A step that is there twice was thrown away the first time: it starts again from the state that it started from then.
    """
    torch.manual_seed(SEED)
    model = build().double()
    optimizer = sgd(model.parameters())
    began: Dict[int, Any] = {}
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
