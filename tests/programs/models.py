"""Small random models: a front (features or an embedding table), layers of many kinds one after the other, and a head.

A model is described by a ``Spec``, plain data that hypothesis draws and shrinks. Everything is a few numbers wide, so
that a step takes a millisecond. Values are the same in float32 and float64: they are drawn in float64 and rounded to
float32.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .text import Short

WIDTH, WORDS, CLASSES = 5, 7, 3

FRONTS = ("features", "table", "sparse table", "padded table", "bag", "sparse bag")
USES = ("always", "on even ranks", "on rank 1", "in odd steps", "in the first step", "not in the first step", "never")


@dataclasses.dataclass(frozen=True, repr=False)
class Layer(Short):
    """``kind``: of ``KINDS``. ``of``: which earlier layer it shares a parameter with, where it shares one."""

    kind: str = "linear"
    bias: bool = True
    used: str = "always"
    of: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Spec(Short):
    """``tied_head``: the head is the table of the front, if there is one."""

    front: str = "features"
    layers: tuple[Layer, ...] = ()
    tied_head: bool = False


class Trap(torch.autograd.Function):
    """Identity. Its backward fails where it was set."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise TrapSprung("the program's own failure in backward")


class TrapSprung(RuntimeError):
    pass


@dataclasses.dataclass
class Moment:
    """Of one forward.

    ``trap``: where it is set, as the number of parts of the model behind it, or earlier where that needs no gradient.
        ``on_output``: layer
    -> what to do with what its product gives.
    """

    rank: int
    step: int
    trap: Optional[int] = None
    on_output: dict[int, list[Callable[[Tensor], None]]] = dataclasses.field(default_factory=dict)
    penalties: list[Tensor] = dataclasses.field(default_factory=list)

    def set_trap(self, x: Tensor, behind: int) -> Tensor:
        if self.trap is None or behind > self.trap or not x.requires_grad:
            return x
        self.trap = None
        return Trap.apply(x)

    def uses(self, layer: Layer) -> bool:
        return {
            "always": True,
            "on even ranks": self.rank % 2 == 0,
            "on rank 1": self.rank == 1,
            "in odd steps": self.step % 2 == 1,
            "in the first step": self.step == 0,
            "not in the first step": self.step > 0,
            "never": False,
        }[layer.used]


# ---- Layers: rows x WIDTH to rows x WIDTH


class Block(nn.Module):
    """The plainest: one linear layer, and what others are made of."""

    inputs = WIDTH

    def __init__(self, layer: Layer, earlier: Sequence["Block"]) -> None:
        super().__init__()
        self.linear = nn.Linear(self.inputs, WIDTH, bias=layer.bias)

    def seen(self, y: Tensor) -> Tensor:
        for function in self.on_output:
            function(y)
        return y

    def forward(self, x: Tensor, moment: Moment) -> Tensor:
        return torch.tanh(self.seen(self.linear(x)))

    def square(self) -> Optional[nn.Parameter]:
        """A weight that others may share."""
        return self.linear.weight if self.inputs == WIDTH else None

    def shared_bias(self) -> Optional[nn.Parameter]:
        return self.linear.bias


class Repeated(Block):
    def forward(self, x, moment):
        return torch.tanh(self.linear(torch.tanh(self.seen(self.linear(x)))))


class OnParts(Block):
    """Calls of different numbers of rows."""

    def forward(self, x, moment):
        return torch.tanh(torch.cat([self.seen(self.linear(x[:1])), self.linear(x[1:])]))


class Recurrent(Block):
    inputs = 2 * WIDTH

    def forward(self, x, moment):
        h = torch.zeros_like(x)
        for t in range(3):
            h = torch.tanh(self.linear(torch.cat([x.roll(t, 1), h], 1)))
        return h


class Checkpointed(Block):
    reentrant = False

    def forward(self, x, moment):
        if self.reentrant and not x.requires_grad:
            x = x.detach().requires_grad_()
        return checkpoint(
            lambda z: torch.tanh(self.linear(z)), x, use_reentrant=self.reentrant, preserve_rng_state=False
        )


class Reentrant(Checkpointed):
    reentrant = True


class CheckpointedTwice(Block):
    def forward(self, x, moment):
        once = functools.partial(
            checkpoint, lambda z: torch.tanh(self.linear(z)), use_reentrant=False, preserve_rng_state=False
        )
        return once(once(x))


class Residual(Block):
    """Changed in place."""

    def forward(self, x, moment):
        y = self.linear(x)
        y += x
        return y.tanh_()


class Functional(Block):
    def forward(self, x, moment):
        return torch.tanh(self.seen(F.linear(x, self.linear.weight, self.linear.bias)))


class Product(Block):
    """No call of linear."""

    def forward(self, x, moment):
        y = x @ self.linear.weight.t()
        return torch.tanh(y if self.linear.bias is None else y + self.linear.bias)


class Mixed(Block):
    """A call of linear, and the weight once more."""

    def forward(self, x, moment):
        return torch.tanh(self.seen(self.linear(x)) + 0.5 * (x @ self.linear.weight))


class LateMixed(Block):
    """From step 2 on the weight is used otherwise too, on rank 0."""

    def forward(self, x, moment):
        y = self.seen(self.linear(x))
        if moment.step >= 2 and moment.rank == 0:
            y = y + 0.5 * (x @ self.linear.weight)
        return torch.tanh(y)


class Penalised(Block):
    since = 0

    def forward(self, x, moment):
        if moment.step >= self.since:
            moment.penalties.append(0.1 * self.linear.weight.square().sum())
        return super().forward(x, moment)


class LatePenalised(Penalised):
    since = 2


class CastWeight(Block):
    """The weight is copied into another type for the call."""

    def forward(self, x, moment):
        weight = self.linear.weight.to(torch.float64, copy=True)
        self.seen(weight)
        y = F.linear(x.double(), weight).to(x.dtype)
        return torch.tanh(y if self.linear.bias is None else y + self.linear.bias)


class LowRank(Block):
    """LoRA by weights: a frozen weight and the product of two thin ones, added before the call."""

    def __init__(self, layer, earlier):
        super().__init__(layer, earlier)
        self.linear.weight.requires_grad_(False)
        self.up = nn.Parameter(torch.empty(WIDTH, 2))
        self.down = nn.Parameter(torch.empty(2, WIDTH))

    def forward(self, x, moment):
        return torch.tanh(F.linear(x, self.linear.weight + self.up @ self.down, self.linear.bias))


class LowRankCalls(Block):
    """LoRA by activations."""

    def __init__(self, layer, earlier):
        super().__init__(layer, earlier)
        self.linear.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x, moment):
        return torch.tanh(self.linear(x) + self.seen(self.up(self.down(x))))


class Tied(Block):
    """The weight of an earlier layer, and a bias of its own."""

    def __init__(self, layer, earlier):
        nn.Module.__init__(self)
        weights = [block.square() for block in earlier if block.square() is not None]
        self.weight = weights[layer.of % len(weights)] if weights else nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.empty(WIDTH)) if layer.bias else None

    def forward(self, x, moment):
        return torch.tanh(self.seen(F.linear(x, self.weight, self.bias)))

    def square(self):
        return self.weight

    def shared_bias(self):
        return self.bias


class SharedBias(Tied):
    """The bias of an earlier layer, and a weight of its own."""

    def __init__(self, layer, earlier):
        nn.Module.__init__(self)
        biases = [block.shared_bias() for block in earlier if block.shared_bias() is not None]
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.bias = biases[layer.of % len(biases)] if biases else nn.Parameter(torch.empty(WIDTH))


class Wide(Block):
    """Two layers with an activation in place."""

    def __init__(self, layer, earlier):
        nn.Module.__init__(self)
        self.first, self.second = nn.Linear(WIDTH, 8, bias=layer.bias), nn.Linear(8, WIDTH, bias=layer.bias)

    def forward(self, x, moment):
        return self.second(F.relu(self.first(x) + 0.1, inplace=True)).tanh()

    def square(self):
        return None

    def shared_bias(self):
        return self.second.bias


class OneOfTheseOnly(Block):
    """Blocks without a linear weight."""

    def __init__(self, layer, earlier):
        nn.Module.__init__(self)
        self.layer = self.make(layer.bias)

    def square(self):
        return None

    def shared_bias(self):
        return None


class Convolution(OneOfTheseOnly):
    @staticmethod
    def make(bias):
        return nn.Conv1d(1, 2, 3, padding=1, bias=bias)

    def forward(self, x, moment):
        return torch.tanh(self.layer(x[:, None]).mean(1))


class Norm(OneOfTheseOnly):
    @staticmethod
    def make(bias):
        return nn.LayerNorm(WIDTH, eps=0.1, bias=bias)

    def forward(self, x, moment):
        return self.layer(x)


class Gru(OneOfTheseOnly):
    @staticmethod
    def make(bias):
        return nn.GRU(1, WIDTH, bias=bias, batch_first=True)

    def forward(self, x, moment):
        return self.layer(x[:, :2, None])[0][:, -1]


class Scale(OneOfTheseOnly):
    """A parameter without dimensions."""

    @staticmethod
    def make(bias):
        holder = nn.Module()
        holder.scale = nn.Parameter(torch.empty(()))
        return holder

    def forward(self, x, moment):
        return x * (1 + 0.1 * self.layer.scale)


KINDS: dict[str, type[Block]] = {
    "linear": Block,
    "repeated": Repeated,
    "on parts": OnParts,
    "recurrent": Recurrent,
    "checkpointed": Checkpointed,
    "checkpointed twice": CheckpointedTwice,
    "reentrant": Reentrant,
    "residual": Residual,
    "functional": Functional,
    "product": Product,
    "mixed": Mixed,
    "late mixed": LateMixed,
    "penalised": Penalised,
    "late penalised": LatePenalised,
    "cast": CastWeight,
    "low rank": LowRank,
    "low rank calls": LowRankCalls,
    "tied": Tied,
    "shared bias": SharedBias,
    "wide": Wide,
    "convolution": Convolution,
    "norm": Norm,
    "gru": Gru,
    "scale": Scale,
}
# PyTorch itself refuses batches without rows.
NOT_EMPTY = frozenset({"gru"})
# Outputs are changed in place, which full backward hooks of modules do not allow.
IN_PLACE = frozenset({"residual", "wide"})


# ---- The model


class Net(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.front = {
            "features": lambda: None,
            "table": lambda: nn.Embedding(WORDS, WIDTH),
            "sparse table": lambda: nn.Embedding(WORDS, WIDTH, sparse=True),
            "padded table": lambda: nn.Embedding(WORDS, WIDTH, padding_idx=1),
            "bag": lambda: nn.EmbeddingBag(WORDS, WIDTH, mode="sum"),
            "sparse bag": lambda: nn.EmbeddingBag(WORDS, WIDTH, mode="mean", sparse=True),
        }[spec.front]()
        blocks: list[Block] = []
        for layer in spec.layers:
            blocks.append(KINDS[layer.kind](layer, blocks))
        self.layers = nn.ModuleList(blocks)
        self.head = None if spec.tied_head and self.front is not None else nn.Linear(WIDTH, CLASSES)

    def forward(self, batch: "Batch", moment: Moment) -> Tensor:
        dtype = next(self.parameters()).dtype
        if self.front is None:
            x = batch.x.to(dtype)
        else:
            x = self.front(batch.ids)
            x = x.mean(1) if isinstance(self.front, nn.Embedding) else x
        for index, (layer, block) in enumerate(zip(self.spec.layers, self.layers)):
            x = moment.set_trap(x, behind=len(self.layers) + 1 - index)
            if moment.uses(layer):
                block.on_output = moment.on_output.get(index, ())
                x = block(x, moment)
        x = moment.set_trap(x, behind=1)
        y = F.linear(x, self.front.weight)[:, :CLASSES] if self.head is None else self.head(x)
        return moment.set_trap(y, behind=0)


def build(spec: Spec, dtype: torch.dtype) -> Net:
    """Without a look at the process's random state, which ranks that are threads share."""
    net = Net(spec)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, p in net.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.4)
    return net.to(dtype)


@functools.lru_cache(maxsize=4096)
def parameter_names(spec: Spec) -> tuple[str, ...]:
    return tuple(name for name, _ in Net(spec).named_parameters())


@functools.lru_cache(maxsize=4096)
def frozen_parameters(spec: Spec) -> frozenset[str]:
    """Those that the model itself makes want no gradient."""
    return frozenset(name for name, p in Net(spec).named_parameters() if not p.requires_grad)


def sparse_parameters(spec: Spec) -> frozenset[str]:
    """Those whose gradient autograd makes a sparse tensor."""
    tied = spec.tied_head
    return frozenset({"front.weight"}) if "sparse" in spec.front and not tied else frozenset()


@functools.lru_cache(maxsize=4096)
def not_saved(spec: Spec) -> tuple[str, ...]:
    """Parameters that may be changed in place between forward and backward, because no node of the graph has saved
    them.
    """
    found = []
    if spec.front != "features" and not spec.tied_head:
        found.append("front.weight")
    if spec.front == "features" and spec.layers and spec.layers[0].kind in ("linear", "functional"):
        later = {layer.kind for layer in spec.layers[1:]}
        if not later & {"tied"}:
            found.append("layers.0.linear.weight")
    for index, layer in enumerate(spec.layers):
        if layer.kind in ("linear", "repeated", "on parts", "functional", "checkpointed", "penalised") and layer.bias:
            found.append(f"layers.{index}.linear.bias")
    return tuple(found)


# ---- Data


class Batch(NamedTuple):
    x: Tensor
    ids: Tensor
    target: Tensor


@functools.lru_cache(maxsize=4096)
def batch(rank: int, step: int, number: int, rows: int) -> Batch:
    """Different on every rank and in every pass. float64 numbers that float32 can hold."""
    generator = torch.Generator().manual_seed(1 + rank * 1_000_003 + step * 10_007 + number * 101)
    x = torch.randn(rows, WIDTH, generator=generator).double()
    target = torch.randn(rows, CLASSES, generator=generator).double()
    return Batch(x, torch.randint(WORDS, (rows, 2), generator=generator), target)


def losses(net: Net, data: Batch, moment: Moment) -> list[Tensor]:
    """Two terms, whose sum is the loss."""
    y = net(data, moment)
    linear = (y * data.target.to(y.dtype)).sum() / 4
    return [linear, y.square().sum() / 16 + sum(moment.penalties)]
