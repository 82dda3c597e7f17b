"""The systems that benches compare, behind one interface: a model and one training step's communication."""

import tempfile
import uuid
from typing import Callable, Dict

import horovod.torch as horovod
import torch

import poseidon_hvd as hvd

BUILDERS: Dict[str, Callable[[torch.nn.Module], "System"]] = {}


class System:
    """One way to reduce gradients.

    ``run`` does forward, backward and whatever makes ``.grad`` the mean over ranks; the parameters do not move, so that every system
    and every step does the same work.
    """

    def __init__(self, name: str, model: torch.nn.Module, forward: Callable, finish: Callable[[], None], optimizer=None):
        self.name = name
        self.model = model
        self.optimizer = optimizer
        self._forward = forward
        self._finish = finish

    def run(self, loss_of: Callable[[Callable], torch.Tensor]) -> None:
        for p in self.model.parameters():
            p.grad = None
        loss_of(self._forward).backward()
        self._finish()


def _builder(name):
    def register(build):
        BUILDERS[name] = build
        return build

    return register


@_builder("none")
def _none(model):
    return System("none", model, model, lambda: None)


@_builder("horovod")
def _horovod(model):
    optimizer = horovod.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    return System("horovod", model, model, optimizer.synchronize, optimizer)


@_builder("ddp")
def _ddp(model):
    if not torch.distributed.is_initialized():
        path = hvd.broadcast_object(f"{tempfile.gettempdir()}/bench-ddp-{uuid.uuid4().hex}", root_rank=0, name="bench.ddp.store")
        torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=hvd.rank(), world_size=hvd.size())
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    return System("ddp", model, ddp, lambda: None)


def _poseidon(policy):
    def build(model):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), policy=policy)
        return System(f"poseidon-{policy}", model, model, optimizer.synchronize, optimizer)

    return build


for _policy in ("allreduce", "sfb", "bytes"):
    BUILDERS[f"poseidon-{_policy}"] = _poseidon(_policy)
