"""The part of ``horovod.torch`` that ranks which are threads can have: constants, process sets, some collectives.

Reductions and gathers of tensors travel over the transport, with names, as those of the product do. Everything else is
exchanged in Python (``meeting``).
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Callable, Optional, Union

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Adasum, Average, Max, Min, Product, Sum
from horovod.torch.mpi_ops import global_process_set as horovods_global_process_set

from .meeting import Meeting


class RankSet:
    """A process set as one rank sees it."""

    def __init__(self, rank: int, ranks: Sequence[int], process_set_id: int) -> None:
        self._rank, self.ranks, self.process_set_id = rank, list(ranks), process_set_id

    def included(self) -> bool:
        return self._rank in self.ranks

    def rank(self) -> int:
        """Within the set; -1 outside of it, as in Horovod."""
        return self.ranks.index(self._rank) if self.included() else -1

    def size(self) -> int:
        return len(self.ranks)


class LocalHorovod:
    """Of one rank. ``exchange`` is not Horovod's: everyone's value, in the order of ranks."""

    Average, Sum, Min, Max, Product, Adasum = Average, Sum, Min, Max, Product, Adasum
    Compression, HorovodInternalError = Compression, HorovodInternalError

    def __init__(self, world, rank: int, meeting_of: Callable[[Sequence[int]], Meeting]) -> None:
        self._world, self._rank, self._meeting_of = world, rank, meeting_of
        self.global_process_set = RankSet(rank, range(world.size), 0)

    def __getattr__(self, name: str):
        raise AttributeError(f"horovod.torch.{name} needs real ranks: @case(real=...)")

    # ---- Ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world.size

    local_rank, local_size = rank, size

    def is_initialized(self) -> bool:
        return True

    def ProcessSet(self, ranks: Sequence[int]) -> RankSet:
        """Every one is known to all ranks at once."""
        return RankSet(self._rank, sorted(ranks), self._world.process_set_id(ranks))

    def rank_set(self, given) -> RankSet:
        """A process set of Horovod's, or of ours, as ours."""
        if isinstance(given, RankSet):
            return given
        return self.global_process_set if given is horovods_global_process_set else self.ProcessSet(given.ranks)

    def exchange(self, value: Any = None, process_set: Optional[RankSet] = None) -> list[Any]:
        return self._meeting_of((process_set or self.global_process_set).ranks).exchange(self._rank, value)

    # ---- Tensors, over the transport

    def allreduce_async(
        self,
        tensor: torch.Tensor,
        average=None,
        name: str = "allreduce",
        op=None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Optional[RankSet] = None,
    ):
        assert average is None, "say op=Average or op=Sum"
        members = process_set or self.global_process_set
        return self._world.native.allreduce(
            self._rank,
            name,
            tensor,
            Average if op is None else op,
            prescale_factor,
            postscale_factor,
            members.process_set_id,
        )

    def allgather_async(self, tensor: torch.Tensor, name: str = "allgather", process_set: Optional[RankSet] = None):
        members = process_set or self.global_process_set
        return self._world.native.allgather(self._rank, name, tensor, members.process_set_id)

    def synchronize(self, handle) -> torch.Tensor:
        try:
            return handle.wait()
        except RuntimeError as error:
            raise HorovodInternalError(str(error)) from None

    def allreduce(self, tensor: torch.Tensor, *arguments, **options) -> torch.Tensor:
        return self.synchronize(self.allreduce_async(tensor, *arguments, **options))

    def allgather(self, tensor: torch.Tensor, *arguments, **options) -> torch.Tensor:
        return self.synchronize(self.allgather_async(tensor, *arguments, **options))

    def sparse_allreduce_async(self, tensor: torch.Tensor, *, name: str, op, process_set: Optional[RankSet] = None):
        """As Horovod's, which gathers ids and values one after the other."""
        members = process_set or self.global_process_set
        ids = self.allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", members)
        values = self.allgather_async(tensor._values(), f"{name}.values", members)

        def finish() -> torch.Tensor:
            gathered = self.synchronize(values)
            all_ids = self.synchronize(ids)
            if op == Average:
                gathered = gathered / members.size()
            return torch.sparse_coo_tensor(all_ids.t(), gathered, tensor.shape)

        return finish

    # ---- In Python

    def barrier(self) -> None:
        self.exchange()

    def broadcast(self, tensor: torch.Tensor, root_rank: int, name: Optional[str] = None) -> torch.Tensor:
        return self.exchange(tensor.detach().clone())[root_rank].clone()

    def broadcast_object(self, value: Any = None, root_rank: int = 0, name: Optional[str] = None) -> Any:
        return copy.deepcopy(self.exchange(value)[root_rank])

    def allgather_object(self, value: Any, name: Optional[str] = None) -> list[Any]:
        return copy.deepcopy(self.exchange(value))

    def broadcast_parameters(self, params: Union[dict, Iterable[tuple[str, torch.Tensor]]], root_rank: int) -> None:
        named = sorted(params.items()) if isinstance(params, dict) else list(params)
        sent = self.exchange([(name, tensor.detach().clone()) for name, tensor in named])[root_rank]
        assert [name for name, _ in sent] == [name for name, _ in named], "ranks have different parameters"
        with torch.no_grad():
            for (_, tensor), (_, source) in zip(named, sent):
                tensor.copy_(source)
