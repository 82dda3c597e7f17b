"""The rank that a case runs on: Horovod, data as a formula of rank, step and index, and comparisons between ranks."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import numpy as np
import torch

# The process set of the cases that need one, known from the start.
SUBSET = (1, 3)
# Of every case, on all ranks.
DEFAULT_SEED = 1234


class Rank:
    """Passed to every case. A process of its own (here) or a thread (``harness.world``).

    Attributes:
        rank, size: as in Horovod.
        horovod: ``horovod.torch``; where ranks are threads, the part of it that needs no Horovod.
        subset: a process set of ranks 1 and 3, where there are so many.
        is_thread: there is no plain Horovod to compare with.
    """

    is_thread = False

    def __init__(self, horovod: Any, rank: int, size: int, subset: Any) -> None:
        self.horovod, self.rank, self.size, self.subset = horovod, rank, size, subset

    @classmethod
    def start(cls, size: int) -> "Rank":
        import horovod.torch as horovod

        subset = horovod.ProcessSet(list(SUBSET)) if size > max(SUBSET) else None
        horovod.init(process_sets=[subset] if subset else None)
        assert horovod.size() == size, f"launched {size} ranks, Horovod sees {horovod.size()}"
        return cls(horovod, horovod.rank(), horovod.size(), subset)

    def begin_case(self) -> None:
        torch.manual_seed(DEFAULT_SEED)

    def end_case(self, index: int) -> None:
        """All ranks are here, at the same case."""
        everywhere = self.gather(torch.tensor([index]))
        assert everywhere.unique().numel() == 1, f"ranks are in cases number {everywhere.tolist()}"

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.horovod.allgather(tensor, name="harness.gather")

    def reduce(self, tensor: torch.Tensor, op=None, process_set=None) -> torch.Tensor:
        """Mean over ranks (or another op) of a float64 tensor."""
        horovod = self.horovod
        return horovod.allreduce(
            tensor,
            op=horovod.Average if op is None else op,
            name="harness.reduce",
            process_set=process_set or horovod.global_process_set,
        )

    def everywhere(self, value: bool) -> bool:
        return bool(self.gather(torch.tensor([int(value)])).all())

    def assert_same_everywhere(
        self, tensors: Iterable[Optional[torch.Tensor]], what: str, members: Optional[Sequence[int]] = None
    ) -> None:
        """Bitwise, including which of them are None.

        All ranks call it; those of ``members`` (default: all) are compared.
        """
        digest = hashlib.sha256()
        for tensor in tensors:
            if tensor is None:
                digest.update(b"none")
                continue
            tensor = tensor.detach()
            dense = tensor.to_dense() if tensor.is_sparse else tensor
            digest.update(str(dense.dtype).encode())
            digest.update(dense.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b"")
        mine = torch.from_numpy(np.frombuffer(digest.digest(), dtype=np.int64).copy())[None]
        digests = self.gather(mine)
        members = range(self.size) if members is None else members
        differing = [r for r in members if not torch.equal(digests[r], digests[members[0]])]
        assert not differing, f"{what}: ranks {differing} differ from rank {members[0]}"

    def random(self, step: int, *shape: int, salt: int = 0) -> torch.Tensor:
        """Float64, normally distributed, different on every rank, step and salt."""
        generator = torch.Generator().manual_seed(1 + self.rank * 1_000_003 + step * 10_007 + salt * 101)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def integers(self, step: int, high: int, *shape: int, salt: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2 + self.rank * 1_000_003 + step * 10_007 + salt * 101)
        return torch.randint(high, shape, generator=generator)
