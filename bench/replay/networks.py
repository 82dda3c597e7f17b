"""What is replayed: layers with their parameters and multiply-adds, and what the papers measured on one node and on
many.

Tags: paper, abstract: read there. recalled: from memory, unverified. derived: arithmetic from the facts beside it.
"""

import dataclasses
from typing import Callable, Optional

from bench.replay import architectures
from bench.replay.architectures import Layer

__all__ = ["NETWORKS", "Network", "Published", "get"]


@dataclasses.dataclass(frozen=True)
class Published:
    """A speedup that somebody measured: ``speedup`` of ``nodes`` over one."""

    system: str
    nodes: int
    link: str
    speedup: float
    source: str


@dataclasses.dataclass(frozen=True)
class Network:
    """One experiment.

    Attributes:
        batch: samples of one rank and step.
        samples_per_second: of one node without communication.
        rate_source: where that comes from.
        parameters: published total, to check the layer table against.
        link: bandwidth of a node in the experiment, as ``--rate`` takes it.
    """

    name: str
    build: Callable[[], list[Layer]]
    batch: int
    samples_per_second: float
    rate_source: str
    parameters: float
    link: str
    published: tuple[Published, ...] = ()

    @property
    def step_seconds(self) -> float:
        return self.batch / self.samples_per_second

    def layers(self) -> list[Layer]:
        return self.build()


_POSEIDON = "Poseidon, arXiv 1706.03292"
_GRADIENTFLOW = "GradientFlow, arXiv 1902.06855"
_SURVEY = "survey, arXiv 2005.13247"


def _survey(*rows: tuple[str, float]) -> tuple[Published, ...]:
    return tuple(
        Published(method, 32, "10gbit", speedup, f"{_SURVEY} [paper]: 8 machines x 4 GPUs") for method, speedup in rows
    )


_ALL = (
    Network(
        "vgg19-22k",
        lambda: architectures.vgg19(21841),
        32,
        20 * 32 / 18.5,
        f"{_POSEIDON} [paper]: 18.5 s per 20 iterations on one Titan X, Caffe",
        229e6,
        "10gbit",
        (
            Published("Poseidon", 16, "10gbit", 15.5, f"{_POSEIDON} [abstract]"),
            Published("Poseidon", 16, "40gbit", 16 * 18.5 / 19.7, f"{_POSEIDON} [paper]"),
            Published("WFBP + PS", 16, "40gbit", 16 * 18.5 / 25.6, f"{_POSEIDON} [paper]"),
            Published("PS", 16, "40gbit", 16 * 18.5 / 105, f"{_POSEIDON} [paper]"),
            Published("Poseidon", 32, "40gbit", 29.5, f"{_POSEIDON} [paper]"),
        ),
    ),
    Network(
        "vgg19",
        lambda: architectures.vgg19(1000),
        32,
        35.0,
        f"{_POSEIDON} [recalled]: one Titan X, Caffe",
        143e6,
        "10gbit",
    ),
    Network(
        "googlenet",
        architectures.googlenet,
        128,
        257.0,
        f"{_POSEIDON} [recalled]: one Titan X, Caffe",
        7e6,
        "10gbit",
        (
            Published("MG-WFBP", 8, "10gbit", 7.4, "MG-WFBP; another GPU and batch"),
            Published("WFBP", 8, "10gbit", 6.2, "MG-WFBP; another GPU and batch"),
        ),
    ),
    Network(
        "inception-v3",
        architectures.inception_v3,
        32,
        43.0,
        f"{_POSEIDON} [recalled]: one Titan X, TensorFlow",
        27e6,
        "10gbit",
        (
            Published("Poseidon", 32, "40gbit", 31.5, f"{_POSEIDON} [abstract]"),
            Published("TensorFlow", 32, "40gbit", 20.0, f"{_POSEIDON} [abstract]"),
        ),
    ),
    Network(
        "resnet152",
        lambda: architectures.resnet((3, 8, 36, 3)),
        32,
        21.0,
        "[derived] the multiply-adds per second of Inception-V3 at 43 images/s on the same GPU",
        60.2e6,
        "10gbit",
    ),
    Network(
        "alexnet",
        architectures.alexnet,
        128,
        1514e3 / 410,
        f"{_GRADIENTFLOW} [derived]: 1514K images/s are 410x one Volta; batch 128 [recalled]",
        61e6,
        "56gbit",
        (
            Published(
                "GradientFlow, overlap", 512, "56gbit", 349e3 / (1514e3 / 410), f"{_GRADIENTFLOW} [derived], fp16"
            ),
            Published("GradientFlow, lazy", 512, "56gbit", 780e3 / (1514e3 / 410), f"{_GRADIENTFLOW} [derived], fp16"),
            Published(
                "GradientFlow, CSC", 512, "56gbit", 410.0, f"{_GRADIENTFLOW} [paper], fp16, sparse: other results"
            ),
        ),
    ),
    Network(
        "resnet50",
        lambda: architectures.resnet((3, 4, 6, 3)),
        128,
        273e3 / 434,
        f"{_GRADIENTFLOW} [derived]: 273K images/s are 434x one Volta; batch 128 [recalled]",
        25.6e6,
        "56gbit",
        (
            Published("GradientFlow, overlap", 512, "56gbit", 80e3 / (273e3 / 434), f"{_GRADIENTFLOW} [derived], fp16"),
            Published("GradientFlow, lazy", 512, "56gbit", 270e3 / (273e3 / 434), f"{_GRADIENTFLOW} [derived], fp16"),
            *_survey(("MG-WFBP", 27.2), ("WFBP-A2A", 20.2)),
        ),
    ),
    Network(
        "bert-base",
        lambda: architectures.bert(12, 768, 64),
        64,
        213.0,
        f"{_SURVEY} [paper]: one GPU, 64 tokens",
        110e6,
        "10gbit",
        _survey(
            ("BSP-A2A", 9.1),
            ("WFBP-A2A", 9.5),
            ("MG-WFBP", 9.0),
            ("ByteScheduler-A2A", 10.6),
            ("WFBP-PS, extra servers", 12.0),
        ),
    ),
    Network(
        "bert-large",
        lambda: architectures.bert(24, 1024, 64),
        8,
        49.0,
        f"{_SURVEY} [paper]: one GPU, 64 tokens",
        340e6,
        "10gbit",
        _survey(
            ("BSP-A2A", 2.1),
            ("WFBP-A2A", 2.1),
            ("MG-WFBP", 2.1),
            ("ByteScheduler-A2A", 2.2),
            ("BSP-PS, extra servers", 2.4),
        ),
    ),
    Network("tiny", architectures.tiny, 8, 100.0, "made up, for tests of the instrument", 155e3, "1gbit"),
)

NETWORKS: dict[str, Network] = {network.name: network for network in _ALL}


def get(name: str) -> Network:
    """Raises ``ValueError`` with the known names."""
    found: Optional[Network] = NETWORKS.get(name)
    if found is None:
        raise ValueError(f"unknown network {name!r}: one of {', '.join(NETWORKS)}")
    return found
