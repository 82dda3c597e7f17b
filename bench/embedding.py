"""One large embedding table whose batch touches few of its rows: dense and sparse gradients, theirs and ours.

    python -m bench.embedding --hosts 4 --rate 200mbit --steps 7
    python -m bench.embedding --local --np 2 --vocabulary 2000     # loopback, no shaping: says nothing about bandwidth

An embedding of 50,000 x 256, 64 sequences of 64 tokens per rank, their mean, and a small linear head. Tokens are drawn
as in text: the r-th most frequent of V has a probability proportional to 1 / (r + 2.7), Zipf's law with Mandelbrot's
shift; which token has which rank is drawn once. ``--uniform`` draws every token alike. The systems do the same steps by
turns, as in bench.train. See docs/benchmarks.md.
"""

import argparse
import faulthandler
import pathlib
from typing import Any, NamedTuple, Optional

from bench import launch, steps

REFERENCES = ("horovod", "horovod-sparse", "none")
TABLE = "tokens.weight"
CLASSES = 16
_SHIFT = 2.7


class Kind(NamedTuple):
    """How a system of this bench comes about.

    Attributes:
        system: what wraps the model, a key of ``systems.BUILDERS``.
        sparse: whether the embedding has ``sparse=True``.
        schemes: forced on ours.
    """

    system: str
    sparse: bool = False
    schemes: Optional[dict[str, str]] = None


KINDS = {
    "none": Kind("none"),
    "horovod": Kind("horovod"),
    "horovod-sparse": Kind("horovod", sparse=True),
    "ddp": Kind("ddp"),
    "poseidon-time": Kind("poseidon-time"),
    "poseidon-row-sparse": Kind("poseidon-time", schemes={TABLE: "row-sparse"}),
    "poseidon-sparse": Kind("poseidon-time", sparse=True),
}


def parse_args():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.embedding", description=__doc__, formatter_class=formatter)
    parser.add_argument("--systems", default=",".join(KINDS), help="in the order of each round (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=50_000, help="rows of the table (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="columns of the table (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=64, help="per rank and step (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of each sequence (default: %(default)s)")
    parser.add_argument("--uniform", action="store_true", help="every token is as likely as any other")
    parser.add_argument(
        "--steps", type=int, default=7, help="timed rounds, one step of each system (default: %(default)s)"
    )
    parser.add_argument("--timeline", action="store_true", help="print where a step's time went")
    parser.add_argument(
        "--result",
        help="name of the files (default: embedding-HOSTSxRATE, or embedding-uniform-...); empty: write none",
    )
    launch.add_options(parser)
    args = parser.parse_args()
    unknown = sorted(set(args.systems.split(",")) - set(KINDS))
    if unknown:
        parser.error(f"unknown systems {', '.join(unknown)}. Choose from {', '.join(KINDS)}.")
    return args


# ---- Rank


def draw_tokens(shape, vocabulary: int, *, uniform: bool, seed: int):
    """Token numbers of int64, of a generator of their own; the same distribution for every seed."""
    import torch

    place = torch.arange(1, vocabulary + 1, dtype=torch.float64)
    frequency = torch.ones_like(place) if uniform else 1.0 / (place + _SHIFT)
    number_of_place = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))
    count = shape[0] * shape[1]
    drawn = torch.multinomial(frequency, count, replacement=True, generator=torch.Generator().manual_seed(seed))
    return number_of_place[drawn].reshape(shape)


def merged_bytes(distinct, width: int) -> float:
    """Bytes that a rank sends for a table per step, mean over ranks, if each sends its distinct rows once, to all
    others round a ring.

    Args:
        distinct: number of distinct tokens of each rank.
        width: of the table; a row is that many float32, and its number of 8 bytes.
    """
    return (len(distinct) - 1) / len(distinct) * sum(distinct) * (width + 2) * 4


def work(folder: pathlib.Path) -> None:
    """One rank: builds, checks, times; rank 0 answers."""
    args = launch.settings_of(folder)
    import torch

    import poseidon_hvd as hvd
    from bench import systems

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = torch.nn.Embedding(args.vocabulary, args.width)
            self.head = torch.nn.Linear(args.width, CLASSES)

        def forward(self, tokens):
            return self.head(self.tokens(tokens).mean(dim=1))

    faulthandler.dump_traceback_later(args.timeout, exit=True)
    torch.set_num_threads(args.threads)
    hvd.init()
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(1 + hvd.rank())
    tokens = draw_tokens((args.sequences, args.tokens), args.vocabulary, uniform=args.uniform, seed=1 + hvd.rank())
    target = torch.randint(CLASSES, (args.sequences,))

    def loss_of(forward):
        return torch.nn.functional.cross_entropy(forward(tokens), target)

    def build(name):
        kind = KINDS[name]
        copy = systems.share_parameters(model)
        copy.tokens.sparse = kind.sparse
        system = systems.BUILDERS[kind.system](copy, **({} if kind.schemes is None else {"schemes": kind.schemes}))
        system.name = name
        return system

    built = [build(name) for name in args.systems.split(",")]
    distinct = hvd.allgather_object(int(tokens.unique().numel()), name="bench.distinct")
    measured = steps.measure(built, model, loss_of, args, REFERENCES)
    if measured is not None:
        keys = ("systems", "vocabulary", "width", "sequences", "tokens", "uniform", "local", "steps", "threads")
        settings = {key: getattr(args, key) for key in keys}
        settings.update(hosts=1 if args.local else args.hosts, rate="loopback" if args.local else args.rate)
        sent, formula = measured["wire_bytes_per_step"], merged_bytes(distinct, args.width)
        launch.answer(
            folder,
            {
                "benchmark": "embedding",
                "settings": settings,
                "distinct_tokens": distinct,
                "formula_bytes_per_step": formula,
                "sent_of_formula": {name: None if value is None else value / formula for name, value in sent.items()},
                **measured,
            },
        )
    systems.close()


# ---- Launcher


def title(measured: dict[str, Any]) -> str:
    s = measured["settings"]
    network = "loopback, no shaping" if s["local"] else s["rate"]
    drawn = "uniform" if s["uniform"] else "Zipf"
    batch = f"{s['sequences']} x {s['tokens']} tokens each ({drawn})"
    return f"embedding {s['vocabulary']} x {s['width']}, {measured['ranks']} ranks, {batch}, {network}"


def main() -> None:
    args = parse_args()
    if args.worker is not None:
        work(args.worker)
        return
    measured = launch.measured_by_ranks("bench.embedding", args)
    distinct, formula = measured["distinct_tokens"], measured["formula_bytes_per_step"]
    note = (
        f"Distinct tokens of a rank: {min(distinct)} to {max(distinct)} of {args.sequences * args.tokens}. "
        f"Of formula: MB sent, head "
        f"and negotiation included, over the {formula / 1e6:.2f} MB of the table's distinct rows with their numbers."
    )
    columns = {
        "of formula": {
            name: "-" if ratio is None else f"{ratio:.2f}" for name, ratio in measured["sent_of_formula"].items()
        }
    }
    name = f"embedding-{'uniform-' if args.uniform else ''}{launch.where(args)}" if args.result is None else args.result
    steps.publish(args, measured, title(measured), name, columns=columns, note=note)


if __name__ == "__main__":
    main()
