"""Networks that benches train, at the sizes that matter to communication, on synthetic batches.

``build(name)`` gives a ``Workload``: a model of the published shape, and batches for it. ``scale`` shrinks pictures,
sequences and batches but no parameter: what is sent as whole gradients stays, computing falls.
"""

import dataclasses
import itertools
from typing import Callable

import torch
from torch import nn

Batch = tuple[tuple[torch.Tensor, ...], torch.Tensor]

WORKLOADS: dict[str, "Workload"] = {}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
        name: as on the command line.
        rows: samples per rank and step where nothing else is asked for.
        make_model: a model with fresh parameters from torch's global generator.
        make_batch: (rows, scale) -> (inputs of the model, target), from torch's global generator.
        loss: (output, target) -> scalar.
    """

    name: str
    rows: int
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int, float], Batch]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.cross_entropy


def build(name: str) -> Workload:
    """The workload of that name.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    if name not in WORKLOADS:
        raise ValueError(f"{name!r} is not a model. Choose one of {', '.join(WORKLOADS)}.")
    return WORKLOADS[name]


def _add(name, rows, make_model, make_batch, **options):
    WORKLOADS[name] = Workload(name, rows, make_model, make_batch, **options)


def _scaled(value: int, scale: float, least: int) -> int:
    return max(least, round(value * scale))


def _pictures(least: int) -> Callable[[int, float], Batch]:
    def make(rows: int, scale: float) -> Batch:
        side = _scaled(224, scale, least)
        return (torch.randn(rows, 3, side, side),), torch.randint(1000, (rows,))

    return make


def _mlp(widths, last_activation=False):
    layers = []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers if last_activation else layers[:-1]))


def _alexnet() -> nn.Module:
    """61.1M parameters, 58.6M of them in three fully connected layers.

    Single-column variant (Krizhevsky 2014), without dropout.
    """
    features = []
    channels = 3
    for width, kernel, stride, padding, pool in (
        (64, 11, 4, 2, True),
        (192, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    ):
        features += [nn.Conv2d(channels, width, kernel, stride, padding), nn.ReLU()]
        features += [nn.MaxPool2d(3, 2)] if pool else []
        channels = width
    # Nothing to average at 224 x 224; smaller pictures keep the layers behind it at their size.
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(6), nn.Flatten(), *_mlp((9216, 4096, 4096, 1000)))


class _Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolution around a shortcut (He et al. 2015), the stride in the 3x3."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut = None
        if inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x):
        return torch.relu(self.body(x) + (x if self.shortcut is None else self.shortcut(x)))


def _resnet50() -> nn.Module:
    """25.6M parameters in 161 tensors, nearly all of them convolutions and norms."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(_Bottleneck(channels, width, stride if block == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class _Transformer(nn.Module):
    """Classifies sequences: embedding 50,000 x 256, four encoder layers, mean over positions. 16.2M parameters,
    12.8M embedding.
    """

    def __init__(self, vocabulary: int = 50_000, width: int = 256, positions: int = 64, layers: int = 4):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(positions, width))
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.encoder(x).mean(dim=1))


def _sequences(rows: int, scale: float) -> Batch:
    return (torch.randint(50_000, (rows, _scaled(64, scale, 4))),), torch.randint(1000, (rows,))


class _Recommender(nn.Module):
    """DLRM's parts (Naumov et al. 2019): 8 embedding tables, an MLP for dense features, pairwise dot products, an
    MLP on top.
    """

    SIZES = (60_000, 40_000, 20_000, 10_000, 5_000, 2_000, 1_000, 100)
    DENSE = 13

    def __init__(self, width: int = 64):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in self.SIZES)
        self.bottom = _mlp((self.DENSE, 512, 256, width), last_activation=True)
        features = len(self.SIZES) + 1
        self.pairs = tuple(zip(*itertools.combinations(range(features), 2)))
        self.top = _mlp((width + len(self.pairs[0]), 1024, 1024, 512, 1))

    def forward(self, dense, sparse):
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *(table(column) for table, column in zip(self.tables, sparse.unbind(1)))], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, products], dim=1)).squeeze(1)


def _clicks(rows: int, scale: float) -> Batch:
    sparse = torch.stack([torch.randint(size, (rows,)) for size in _Recommender.SIZES], dim=1)
    return (torch.randn(rows, _Recommender.DENSE), sparse), torch.randint(2, (rows,)).float()


_add("alexnet", 32, _alexnet, _pictures(63))
_add(
    "mlp",
    16,
    lambda: _mlp((1024, 2048, 2048, 1000)),
    lambda rows, scale: ((torch.randn(rows, 1024),), torch.randint(1000, (rows,))),
)
_add("resnet50", 8, _resnet50, _pictures(32))
_add("transformer", 64, _Transformer, _sequences)
_add("dlrm", 128, _Recommender, _clicks, loss=nn.functional.binary_cross_entropy_with_logits)


def rows_of(workload: Workload, rows: int, scale: float) -> int:
    """Samples per rank: those asked for (0: the workload's own), scaled; at least two, which batch norm needs."""
    return _scaled(rows or workload.rows, scale, 2)
