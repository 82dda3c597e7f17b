"""Layer tables of well-known networks, in order of their forward pass: parameters and multiply-adds per sample."""

import dataclasses
from collections.abc import Sequence
from typing import Optional, Union

__all__ = ["Layer", "Linear", "alexnet", "bert", "googlenet", "inception_v3", "resnet", "tiny", "vgg19"]


@dataclasses.dataclass(frozen=True)
class Linear:
    """A fully connected layer with bias. ``rows``: per sample, tokens in a transformer."""

    out_features: int
    in_features: int
    rows: int = 1


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one layer computes and owns.

    Attributes:
        macs: multiply-adds of one sample's forward pass.
        tensors: elements of each parameter tensor that can only be reduced whole.
        linear: the fully connected layer, if it is one.
    """

    name: str
    macs: float
    tensors: tuple[int, ...] = ()
    linear: Optional[Linear] = None

    @property
    def parameters(self) -> int:
        fc = self.linear
        return sum(self.tensors) + (fc.out_features * (fc.in_features + 1) if fc else 0)


def _fc(name: str, out_features: int, in_features: int, rows: int = 1) -> Layer:
    return Layer(name, float(out_features * in_features * rows), linear=Linear(out_features, in_features, rows))


class _Convolutions:
    """Follows the shape of a picture through convolutions and pools, and notes each layer with parameters."""

    def __init__(self, size: int, channels: int = 3, *, batch_norm: bool) -> None:
        self.layers: list[Layer] = []
        self.size = size
        self.channels = channels
        self._batch_norm = batch_norm

    def conv(
        self,
        name: str,
        out: int,
        kernel: Union[int, tuple[int, int]],
        stride: int = 1,
        pad: Optional[int] = None,
        channels: Optional[int] = None,
        keep: bool = False,
    ) -> int:
        """A convolution, by default padded to keep the size. ``channels``: read those of a branch; ``keep``: do not
        move on.

        Returns:
            Its output channels.
        """
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        size = self.size
        if height == width:
            size = (size + 2 * (height // 2 if pad is None else pad) - height) // stride + 1
        into = self.channels if channels is None else channels
        weight = out * into * height * width
        self.layers.append(
            Layer(name, float(weight * size * size), (weight, out, out) if self._batch_norm else (weight, out))
        )
        if not keep:
            self.size, self.channels = size, out
        return out

    def chain(self, name: str, steps: Sequence[tuple]) -> int:
        """A branch: convolutions one after another, each (out, kernel) or (out, kernel, stride, pad).

        Shape stays where it was.
        """
        start, into = (self.size, self.channels), self.channels
        for i, step in enumerate(steps):
            self.channels = into
            into = self.conv(f"{name}.{i}", *step)
        self.size, self.channels = start
        return into

    def pool(self, kernel: int, stride: int, pad: int = 0, *, ceil: bool = False) -> None:
        self.size = (self.size + 2 * pad - kernel + (stride - 1 if ceil else 0)) // stride + 1


def vgg19(classes: int) -> list[Layer]:
    net = _Convolutions(224, batch_norm=False)
    for block, (channels, count) in enumerate(((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)), 1):
        for i in range(1, count + 1):
            net.conv(f"conv{block}_{i}", channels, 3)
        net.pool(2, 2)
    return [*net.layers, _fc("fc6", 4096, 25088), _fc("fc7", 4096, 4096), _fc("fc8", classes, 4096)]


def alexnet() -> list[Layer]:
    """Without the two groups of its convolutions, as it is trained since."""
    net = _Convolutions(224, batch_norm=False)
    net.conv("conv1", 64, 11, 4, 2)
    net.pool(3, 2)
    net.conv("conv2", 192, 5)
    net.pool(3, 2)
    for i, channels in enumerate((384, 256, 256), 3):
        net.conv(f"conv{i}", channels, 3)
    return [*net.layers, _fc("fc6", 4096, 9216), _fc("fc7", 4096, 4096), _fc("fc8", 1000, 4096)]


def googlenet() -> list[Layer]:
    """Without the auxiliary classifiers."""
    net = _Convolutions(224, batch_norm=False)
    net.conv("conv1", 64, 7, 2, 3)
    net.pool(3, 2, ceil=True)
    net.conv("conv2_reduce", 64, 1)
    net.conv("conv2", 192, 3)
    net.pool(3, 2, ceil=True)
    table = (
        ("3a", 64, 96, 128, 16, 32, 32),
        ("3b", 128, 128, 192, 32, 96, 64),
        ("4a", 192, 96, 208, 16, 48, 64),
        ("4b", 160, 112, 224, 24, 64, 64),
        ("4c", 128, 128, 256, 24, 64, 64),
        ("4d", 112, 144, 288, 32, 64, 64),
        ("4e", 256, 160, 320, 32, 128, 128),
        ("5a", 256, 160, 320, 32, 128, 128),
        ("5b", 384, 192, 384, 48, 128, 128),
    )
    for name, one, reduce3, three, reduce5, five, pooled in table:
        if name in ("4a", "5a"):
            net.pool(3, 2, ceil=True)
        branches = (((one, 1),), ((reduce3, 1), (three, 3)), ((reduce5, 1), (five, 5)), ((pooled, 1),))
        net.channels = sum(net.chain(f"inception_{name}.{i}", branch) for i, branch in enumerate(branches))
    return [*net.layers, _fc("fc", 1000, 1024)]


def inception_v3() -> list[Layer]:
    """With its auxiliary classifier, which training computes."""
    net = _Convolutions(299, batch_norm=True)
    net.conv("conv1a", 32, 3, 2, 0)
    net.conv("conv2a", 32, 3, 1, 0)
    net.conv("conv2b", 64, 3)
    net.pool(3, 2)
    net.conv("conv3b", 80, 1)
    net.conv("conv4a", 192, 3, 1, 0)
    net.pool(3, 2)
    tall, wide = (7, 1), (1, 7)

    def block(name: str, *branches: Sequence[tuple], passed_on: int = 0) -> None:
        net.channels = passed_on + sum(net.chain(f"{name}.{i}", branch) for i, branch in enumerate(branches))

    for name, pooled in (("mixed5b", 32), ("mixed5c", 64), ("mixed5d", 64)):
        block(name, ((64, 1),), ((48, 1), (64, 5)), ((64, 1), (96, 3), (96, 3)), ((pooled, 1),))
    block("mixed6a", ((384, 3, 2, 0),), ((64, 1), (96, 3), (96, 3, 2, 0)), passed_on=net.channels)
    net.pool(3, 2)
    for name, c in (("mixed6b", 128), ("mixed6c", 160), ("mixed6d", 160), ("mixed6e", 192)):
        block(
            name,
            ((192, 1),),
            ((c, 1), (c, wide), (192, tall)),
            ((c, 1), (c, tall), (c, wide), (c, tall), (192, wide)),
            ((192, 1),),
        )
    body = (net.size, net.channels)
    net.pool(5, 3)
    net.conv("aux.conv0", 128, 1)
    net.conv("aux.conv1", 768, 5, 1, 0)
    net.layers.append(_fc("aux.fc", 1000, 768))
    net.size, net.channels = body
    block(
        "mixed7a",
        ((192, 1), (320, 3, 2, 0)),
        ((192, 1), (192, wide), (192, tall), (192, 3, 2, 0)),
        passed_on=net.channels,
    )
    net.pool(3, 2)
    for name in ("mixed7b", "mixed7c"):
        total = net.chain(f"{name}.0", ((320, 1),))
        for branch, steps in ((1, ((384, 1),)), (2, ((448, 1), (384, 3)))):
            into = net.chain(f"{name}.{branch}", steps)
            total += net.conv(f"{name}.{branch}.a", 384, (1, 3), channels=into, keep=True)
            total += net.conv(f"{name}.{branch}.b", 384, (3, 1), channels=into, keep=True)
        net.channels = total + net.chain(f"{name}.3", ((192, 1),))
    return [*net.layers, _fc("fc", 1000, 2048)]


def resnet(blocks: Sequence[int]) -> list[Layer]:
    """Bottleneck ResNets: (3, 4, 6, 3) has 50 layers, (3, 8, 36, 3) has 152. The stride is in the 3 x 3 convolution."""
    net = _Convolutions(224, batch_norm=True)
    net.conv("conv1", 64, 7, 2, 3)
    net.pool(3, 2, 1)
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for i in range(count):
            stride = 2 if stage > 0 and i == 0 else 1
            if i == 0:
                net.conv(f"stage{stage}.0.shortcut", 4 * width, 1, stride, 0, keep=True)
            net.conv(f"stage{stage}.{i}.1", width, 1)
            net.conv(f"stage{stage}.{i}.2", width, 3, stride)
            net.conv(f"stage{stage}.{i}.3", 4 * width, 1)
    return [*net.layers, _fc("fc", 1000, net.channels)]


def bert(blocks: int, hidden: int, tokens: int, vocabulary: int = 30522) -> list[Layer]:
    """For pretraining.

    The word embedding is also the decoder's weight, so its gradient is complete only at the very end.
    """
    norm = (hidden, hidden)
    layers = [Layer("embeddings", 0.0, (vocabulary * hidden, 512 * hidden, 2 * hidden, *norm))]
    for i in range(blocks):
        layers += [_fc(f"block{i}.{part}", hidden, hidden, tokens) for part in ("query", "key", "value")]
        layers += [
            Layer(f"block{i}.attention", 2.0 * tokens * tokens * hidden),
            _fc(f"block{i}.output", hidden, hidden, tokens),
        ]
        layers += [Layer(f"block{i}.norm1", 0.0, norm), _fc(f"block{i}.up", 4 * hidden, hidden, tokens)]
        layers += [_fc(f"block{i}.down", hidden, 4 * hidden, tokens), Layer(f"block{i}.norm2", 0.0, norm)]
    layers += [_fc("pooler", hidden, hidden), _fc("next_sentence", 2, hidden), _fc("transform", hidden, hidden, tokens)]
    return [
        *layers,
        Layer("transform.norm", 0.0, norm),
        Layer("decoder", float(tokens * vocabulary * hidden), (vocabulary,)),
    ]


def tiny() -> list[Layer]:
    net = _Convolutions(16, batch_norm=False)
    net.conv("conv1", 16, 3)
    net.pool(4, 4)
    return [*net.layers, _fc("fc1", 512, 256), _fc("fc2", 40, 512), Layer("activation", 1e3)]
