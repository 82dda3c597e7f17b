"""The systems that benches compare, behind one interface: a model and one training step's communication.

``BUILDERS[name](model)`` makes a ``System``; ``interleave`` times several in turn. Call ``poseidon_hvd.init()`` first,
and do the same on every rank.
"""

import copy
import dataclasses
import functools
import os
import random
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Callable, Optional

import horovod.torch as horovod
import torch

import poseidon_hvd as hvd

BUILDERS: dict[str, Callable[[torch.nn.Module], "System"]] = {}

PHASES = ("forward", "backward", "synchronize", "update")
STAGES = ("pack", "queue", "wire", "handoff", "rebuild", "waited")

MOST_WARMUP_STEPS = 24  # of a system whose plan follows from measurements
MOST_SHORT_WARMUP_STEPS = 128  # where they are short: those are tried more often
_SHORT_SECONDS = 0.1
_MEASURING_METHODS = ("auto", "merged")  # whose slices follow from measurements

_NAP_SECONDS = 2e-4
_NOTHING = torch.zeros(1)

_process_group_file: Optional[str] = None


class System:
    """One way to reduce gradients, wrapped around a model.

    The optimizer is SGD with a learning rate of 0: it does all of its work, but the parameters do not move, so that
    every system and every step computes the same and gradients can be compared at any time.

    Attributes:
        name: key in ``BUILDERS``.
        model: the model; after a step its ``.grad`` hold the mean over ranks.
        optimizer: has ``stats()`` and ``scheme_report()`` where the system is ours.
        lossy: the gradient is an approximation, so its time is not comparable to that of exact systems.
        warmup_steps: steps until every later step does the same; with ``measures`` the fewest.
        measures: the system's plan follows from what it measures in its first steps, so ``warm_up`` waits for it.
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        forward: Callable,
        optimizer,
        *,
        lossy: bool = False,
        warmup_steps: int = 2,
        measures: bool = False,
    ):
        self.name = name
        self.model = model
        self.optimizer = optimizer
        self.lossy = lossy
        self.warmup_steps = warmup_steps
        self.measures = measures
        self._forward = forward

    def run(self, loss_of: Callable[[Callable], torch.Tensor], *, update: bool = False) -> dict[str, float]:
        """Forward, backward and whatever makes ``.grad`` the mean over ranks.

        Args:
            loss_of: takes the model's forward and returns the loss.
            update: also the optimizer's step.

        Returns:
            Seconds of the training thread in each of ``PHASES``; DDP waits for the network inside of ``backward``.
        """
        marks = [time.perf_counter()]
        self.optimizer.zero_grad()
        loss = loss_of(self._forward)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        distributed = hasattr(self.optimizer, "synchronize")
        if distributed:
            self.optimizer.synchronize()
        marks.append(time.perf_counter())
        if update:
            with self.optimizer.skip_synchronize() if distributed else nullcontext():
                self.optimizer.step()
        marks.append(time.perf_counter())
        return {phase: end - begin for phase, begin, end in zip(PHASES, marks, marks[1:])}


def share_parameters(model: torch.nn.Module) -> torch.nn.Module:
    """A copy with parameters of its own that lie in the same memory: hooks and gradients are apart, weights are held
    once.
    """
    return copy.deepcopy(model, {id(p): torch.nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()})


def gradient_error(system: System, expected: torch.nn.Module) -> float:
    """The worst relative difference of a parameter's gradient; sparse ones count as what they stand for.

    Relative to the norm of the expected one, but to no less than 1e-4 of the largest norm in the model: some gradients
    are zero but for rounding (the bias of an attention's keys).
    """
    wanted = [_dense(p.grad) for p in expected.parameters()]
    norms = [g.norm().item() for g in wanted]
    least = 1e-4 * max(norms)
    return max(
        (_dense(p.grad) - g).norm().item() / max(norm, least)
        for p, g, norm in zip(system.model.parameters(), wanted, norms)
    )


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def plan_of(system: System) -> Optional[dict[str, Any]]:
    """``optimizer.plan()``, the same on every rank; None before the first plan, and where the system makes none."""
    plan = getattr(system.optimizer, "plan", None)
    return None if plan is None else plan()


def warm_up(system: System, loss_of: Callable[[Callable], torch.Tensor]) -> int:
    """Steps until every later one does the same.

    A plan that follows from measurements is made again once some steps have been timed, and again to compare what came
    of that. Once there have been three, and the last has changed no scheme, and a step was taken under it, the system
    is warm. If that does not happen ``MOST_WARMUP_STEPS`` must do, or ``MOST_SHORT_WARMUP_STEPS`` where the plan
    predicts short ones. Later revisions fall into what is timed, as in training.

    Returns:
        How many steps that took, the same on every rank.
    """
    plans: list[tuple[Any, Any]] = []
    while (
        len(plans) < system.warmup_steps or system.measures and len(plans) < _most_steps(system) and not _settled(plans)
    ):
        system.run(loss_of, update=True)
        plans.append(_plan_and_schemes(system))
    return len(plans)


def _most_steps(system: System) -> int:
    """The same on every rank, as what it depends on is."""
    predicted = (plan_of(system) or {}).get("predicted_step_seconds")
    return MOST_WARMUP_STEPS if predicted is None or predicted >= _SHORT_SECONDS else MOST_SHORT_WARMUP_STEPS


def _plan_and_schemes(system: System) -> tuple[Any, Any]:
    """The step at which the plan was made, and its schemes; None without a plan."""
    plan = plan_of(system)
    if plan is None:
        return None, None
    return plan["made_at_step"], [tensor["scheme"] for tensor in plan["tensors"]]


def _settled(plans: Sequence[tuple[Any, Any]]) -> bool:
    """Whether the last step ran under a plan, at least the third, that chose the same schemes as the one before it."""
    schemes = list(dict(plan for plan in plans if plan[0] is not None).values())  # a step's number is that of one plan
    return len(schemes) > 2 and schemes[-1] == schemes[-2] and plans[-1][0] == plans[-2][0]


def wait_for_all() -> None:
    """A barrier at which early ranks sleep.

    ``hvd.barrier()`` asks again and again, on cores that late ranks still need for their step.
    """
    handle = hvd.allreduce_async(_NOTHING, name="bench.barrier")
    while not hvd.poll(handle):
        time.sleep(_NAP_SECONDS)
    hvd.synchronize(handle)


@dataclasses.dataclass
class Samples:
    """One rank's samples of one system, one element per timed step.

    Attributes:
        seconds: from the barrier before the step to this rank's end of it.
        cpu_seconds: of all threads of the process, Horovod's and ours included.
        phases: name in ``PHASES`` -> seconds.
        bytes_sent: by the counter that was passed in; None where it had no value.
        stages: per scheme, seconds per step in each stage, overlapping (``stages_between``); empty where the system has
            no ``stats()``.
        engine_bytes: payload bytes per step that the system itself counted, or None.
        dense: what its allreduces were, per step (``dense_between``); empty where the system has no ``stats()``.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    phases: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {phase: [] for phase in PHASES})
    bytes_sent: list[Optional[int]] = dataclasses.field(default_factory=list)
    stages: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    engine_bytes: Optional[float] = None
    dense: dict[str, float] = dataclasses.field(default_factory=dict)


def interleave(
    built: Sequence[System],
    loss_of: Callable[[Callable], torch.Tensor],
    rounds: int,
    *,
    bytes_sent: Callable[[], Optional[int]] = lambda: None,
    after_round: Callable[[int, dict[str, Samples]], None] = lambda number, samples: None,
) -> dict[str, Samples]:
    """Times ``rounds`` steps of each system, one step of each in turn, so that the machine's mood hits all alike.

    In an order of its own in each round, so that none always follows the same one.

    Args:
        built: the systems, in the same order on every rank; warmed up.
        loss_of: as for ``System.run``.
        rounds: steps of each.
        bytes_sent: reads a counter of bytes; it is read between barriers, so that nobody's transfer is cut off.
        after_round: called with the number of rounds done and all samples so far.

    Returns:
        Name -> this rank's samples.
    """
    samples = {system.name: Samples() for system in built}
    before = {s.name: s.optimizer.stats() for s in built if hasattr(s.optimizer, "stats")}
    for number in range(rounds):
        for system in random.Random(number).sample(built, len(built)):  # the same on every rank
            sample = samples[system.name]
            wait_for_all()
            sent = bytes_sent()
            cpu, start = time.process_time(), time.perf_counter()
            phases = system.run(loss_of, update=True)
            sample.seconds.append(time.perf_counter() - start)
            sample.cpu_seconds.append(time.process_time() - cpu)
            for phase, seconds in phases.items():
                sample.phases[phase].append(seconds)
            wait_for_all()
            sample.bytes_sent.append(None if sent is None else bytes_sent() - sent)
        after_round(number + 1, samples)
    for system in built:
        if system.name in before:
            after, sample = system.optimizer.stats(), samples[system.name]
            sample.stages = stages_between(before[system.name], after, rounds)
            sample.dense = dense_between(before[system.name], after, rounds)
            schemes = after["schemes"]
            sample.engine_bytes = (
                sum(schemes[s]["wire_bytes"] - before[system.name]["schemes"][s]["wire_bytes"] for s in schemes)
                / rounds
            )
    return samples


def idle_cpu_share(seconds: float = 1.0) -> float:
    """Cores that this rank's process takes while its training thread sleeps: Horovod's thread negotiates every
    millisecond.

    Every system's steps, those of ``none`` and DDP too, share the processor with it.
    """
    hvd.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    share = (time.process_time() - cpu) / (time.perf_counter() - start)
    hvd.barrier()
    return share


def stages_between(before: dict[str, Any], after: dict[str, Any], steps: int) -> dict[str, dict[str, float]]:
    """From two ``stats()``: scheme -> stage -> seconds per step, for the schemes that carried something."""
    return {
        scheme: {
            stage: (counters[f"{stage}_seconds"] - before["schemes"][scheme][f"{stage}_seconds"]) / steps
            for stage in STAGES
        }
        for scheme, counters in after["schemes"].items()
        if counters["collectives"] > before["schemes"][scheme]["collectives"]
    }


def dense_between(before: dict[str, Any], after: dict[str, Any], steps: int) -> dict[str, float]:
    """From two ``stats()``, per step: allreduces, those of slices, and gradient bytes that lay in slices already or
    were copied there.
    """
    allreduces = after["schemes"]["allreduce"]["collectives"] - before["schemes"]["allreduce"]["collectives"]
    in_slices = {
        key: (after["dense"][key] - before["dense"][key]) / steps
        for key in ("slices", "in_place_bytes", "copied_bytes")
    }
    return {"allreduces": allreduces / steps, **in_slices}


def close() -> None:
    """Ends what building systems began; at the end of a bench, on every rank."""
    global _process_group_file
    if _process_group_file is not None:
        torch.distributed.destroy_process_group()
        hvd.barrier()
        if hvd.rank() == 0 and os.path.exists(_process_group_file):
            os.unlink(_process_group_file)
        _process_group_file = None


def _builder(name):
    def register(build):
        BUILDERS[name] = build
        return build

    return register


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.0)


@_builder("none")
def _none(model):
    return System("none", model, model, _sgd(model))


@_builder("horovod")
def _horovod(model):
    return System("horovod", model, model, horovod.DistributedOptimizer(_sgd(model), model.named_parameters()))


def _data_parallel(model, **options):
    global _process_group_file
    if _process_group_file is None:
        path = hvd.broadcast_object(
            f"{tempfile.gettempdir()}/bench-ddp-{uuid.uuid4().hex}", root_rank=0, name="bench.ddp.store"
        )
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{path}", rank=hvd.rank(), world_size=hvd.size()
        )
        _process_group_file = path
    # Parameters are equal on all ranks by their seed; sending them once more would take long on a slow link.
    return torch.nn.parallel.DistributedDataParallel(model, init_sync=False, **options)


@_builder("ddp")
def _ddp(model):
    return System("ddp", model, _data_parallel(model), _sgd(model))


@_builder("ddp-powersgd")
def _ddp_powersgd(model):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    # One bucket: the hook starts its later collectives from callbacks, and over gloo those of several buckets come in
    # an order that differs from rank to rank.
    ddp = _data_parallel(model, bucket_cap_mb=1 << 14)
    exact_steps = 2  # the fewest that the hook allows
    ddp.register_comm_hook(
        powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=exact_steps),
        powersgd.powerSGD_hook,
    )
    return System("ddp-powersgd", model, ddp, _sgd(model), lossy=True, warmup_steps=exact_steps + 1)


def poseidon(
    model: torch.nn.Module,
    policy: str,
    *,
    name: Optional[str] = None,
    schemes: Optional[Mapping[str, str]] = None,
    dense: Optional[str] = None,
) -> System:
    """Ours.

    Args:
        model: as for ``BUILDERS``.
        policy: of ``DistributedOptimizer``.
        name: of the system; by default ``poseidon-POLICY``.
        schemes: of ``DistributedOptimizer``, to force some.
        dense: of ``DistributedOptimizer``, how what is allreduced travels.
    """
    optimizer = hvd.DistributedOptimizer(
        _sgd(model), model.named_parameters(), policy=policy, schemes=schemes, dense=dense
    )
    by_time = policy == "time" or (dense or ("auto" if policy == "allreduce" else "lazy")) in _MEASURING_METHODS
    measures = by_time and hvd.size() > 1  # one rank makes one plan
    return System(name or f"poseidon-{policy}", model, model, optimizer, measures=measures)


for _policy in ("time", "bytes", "allreduce", "sfb"):
    BUILDERS[f"poseidon-{_policy}"] = functools.partial(poseidon, policy=_policy)
