"""One rank's model, optimizer and graph while a program runs on it: the part that the run under test and the reference
share.

What needs other ranks is a generator. In the run under test it yields nothing, because the product does it; in the
reference it yields the name of the point at which ``reference`` averages over ranks.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from .models import Moment, batch, build, losses
from .program import Program

Points = Iterator[str]


@dataclasses.dataclass
class Look:
    """What a rank sees at a point of a program. Gradients are dense copies; the reference lacks what is left open."""

    where: str
    parameters: dict[str, Tensor]
    gradients: dict[str, Optional[Tensor]]


class Machine:
    def __init__(self, program: Program, rank: int, dtype: torch.dtype) -> None:
        self.program, self.rank = program, rank
        self.net = build(program.model, dtype)
        self.params = dict(self.net.named_parameters())
        self.step_index = self.forwards = 0
        self.terms: list[Tensor] = []  # of the loss of the last forward
        self.on_output: dict[int, list[Callable[[Tensor], None]]] = {}
        self.handles: dict[int, Any] = {}  # of hooks, by number
        self.hooks: dict[int, Any] = {}  # the actions that set them
        self.nodes: list[
            Any
        ] = []  # gradient accumulators with hooks, which PyTorch keeps no longer than somebody needs them
        self.counted: dict[int, int] = {}  # calls of hooks
        self.seen: list[Tensor] = []  # gradients that the program asked for, of this rank alone
        self.looks: list[Look] = []
        self.optimizer = self.wrap(self.base_optimizer())

    def base_optimizer(self) -> torch.optim.Optimizer:
        params = list(self.params.values())
        kind = self.program.settings.optimizer
        if kind == "momentum":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9)
        if kind == "decay":
            return torch.optim.SGD(params, lr=0.05, momentum=0.5, weight_decay=0.1, nesterov=True)
        if kind == "adam":
            # A large eps: it is not to make steps of the optimizer's full length out of rounding where a gradient is
            # zero.
            return torch.optim.Adam(params, lr=0.02, eps=0.1)
        return torch.optim.SGD(params, lr=0.1)

    def wrap(self, base: torch.optim.Optimizer) -> torch.optim.Optimizer:
        raise NotImplementedError

    # ---- Forward and backward

    def forward(self, rows: int, trap: Optional[int] = None) -> list[Tensor]:
        moment = Moment(self.rank, self.step_index, trap, self.on_output)
        return losses(self.net, batch(self.rank, self.step_index, self.forwards, rows), moment)

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def trainable(self) -> list[str]:
        return [name for name, p in self.params.items() if p.requires_grad]

    # ---- What other ranks take part in

    def after_backward(self) -> Points:
        raise NotImplementedError

    def synchronize(self) -> Points:
        raise NotImplementedError

    def step(self, *, skip: bool = False, closure: Optional[Callable[[], Any]] = None) -> Points:
        raise NotImplementedError

    def look(self, where: str) -> None:
        copy = lambda tensor: tensor.detach().to_dense().clone() if tensor.is_sparse else tensor.detach().clone()  # noqa: E731
        self.looks.append(
            Look(
                where,
                {name: copy(p) for name, p in self.params.items()},
                {name: None if p.grad is None else copy(p.grad) for name, p in self.params.items()},
            )
        )


class RankUnderTest(Machine):
    """Wraps its optimizer with the product's."""

    def __init__(
        self, program: Program, rank: int, wrap: Callable[[Machine, torch.optim.Optimizer], torch.optim.Optimizer]
    ) -> None:
        self._wrap = wrap
        super().__init__(program, rank, torch.float32)

    def wrap(self, base):
        for action in self.program.before:
            for _ in action.play(self):
                pass
        return self._wrap(self, base)

    def after_backward(self):
        yield from ()

    def synchronize(self):
        self.optimizer.synchronize()
        yield from ()

    def step(self, *, skip=False, closure=None):
        with self.optimizer.skip_synchronize() if skip else nullcontext():
            self.optimizer.step(closure)
        yield from ()


class ReferenceRank(Machine):
    """In float64, with PyTorch's own optimizer. Counts what arrives at its gradient accumulators."""

    def __init__(self, program: Program, rank: int) -> None:
        self.arrived: dict[str, int] = {}
        self.met: Optional[set[str]] = None  # what was complete when the first gradient was
        super().__init__(program, rank, torch.float64)

    def wrap(self, base):
        self.arrived = dict.fromkeys(self.params, 0)
        self._counters = []
        for action in self.program.before:
            for _ in action.play(self):
                pass
        for name, p in self.params.items():
            wanted = p.requires_grad
            p.requires_grad_()
            accumulator = p.view_as(p).grad_fn.next_functions[0][0]
            accumulator.register_hook(lambda *_, name=name: self._count(name))
            self._counters.append(accumulator)
            p.requires_grad_(wanted)
        return base

    def _count(self, name: str) -> None:
        self.arrived[name] += 1

    def backward(self, loss, **options):
        super().backward(loss, **options)
        complete = {name for name, count in self.arrived.items() if count >= self.program.settings.passes}
        if self.met is None and complete:
            self.met = complete

    def after_backward(self):
        yield "backward"

    def synchronize(self):
        yield "synchronize"

    def step(self, *, skip=False, closure=None):
        if closure is not None:
            closure()
            yield "backward"
        if not skip:
            yield "synchronize"
        self.optimizer.step()
        yield "step"
