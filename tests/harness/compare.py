"""Gradients and training against references: float64 on the same data, and plain Horovod running the same script.

The measure is the project's: the relative error against the float64 mean over ranks of the local gradients is at most
twice that of plain Horovod. Where both are within a few units of rounding, which of the two is larger is chance, so
errors below ``FLOOR`` of the parameter's dtype pass. Ranks that are threads have no plain Horovod. There the local
gradients that autograd makes in the model's dtype take its place, averaged without rounding.
"""

import dataclasses
import fnmatch
import warnings
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Callable, Optional

import torch

import poseidon_hvd as hvd

from .ranks import Rank

# On up to 4 ranks, whose rows add up in one product. 8 units of rounding (1e-6 in float32); 1 for the 16-bit types,
# where the last rounding to the gradient's dtype dominates.
FLOOR = {
    torch.float64: 8 * torch.finfo(torch.float64).eps,
    torch.float32: 8 * torch.finfo(torch.float32).eps,
    torch.float16: torch.finfo(torch.float16).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
}

Build = Callable[[], torch.nn.Module]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of one of the three runs, as the script under test sees it."""

    rank: Rank
    index: int
    kind: str  # "reference", "horovod" ("plain" where there is none) or "poseidon"
    dtype: torch.dtype  # of this run's model
    data_dtype: torch.dtype  # of the model under test: data are rounded to it in every run
    optimizer: Any = None  # a distributed one; None in "reference" and "plain"

    def x(self, *shape: int, salt: int = 0) -> torch.Tensor:
        """Input that differs between ranks and steps and is the same in all three runs."""
        return self.rank.random(self.index, *shape, salt=salt).to(self.data_dtype).to(self.dtype)

    def ids(self, high: int, *shape: int, salt: int = 0) -> torch.Tensor:
        return self.rank.integers(self.index, high, *shape, salt=salt)


Run = Callable[[torch.nn.Module, Step], None]
Visit = Callable[[torch.nn.Module, int], None]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def schemes_of(optimizer) -> dict[str, str]:
    """Parameter name -> scheme of the plan in force; empty before it is made."""
    plan = optimizer.plan()
    return {t["name"]: t["scheme"] for t in plan["tensors"]} if plan is not None else {}


def reasons_of(optimizer) -> dict[str, str]:
    return {t["name"]: t["reason"] for t in optimizer.plan()["tensors"]}


def assert_schemes(optimizer, expected: Mapping[str, str]) -> None:
    """``expected``: pattern of names -> scheme."""
    got = schemes_of(optimizer)
    for pattern, scheme in expected.items():
        matched = fnmatch.filter(got, pattern)
        assert matched, f"no parameter matches {pattern!r}: {sorted(got)}"
        wrong = {name: got[name] for name in matched if got[name] != scheme}
        assert not wrong, f"expected {scheme} for {pattern!r}, got {wrong}\n{optimizer.scheme_report()}"


@contextmanager
def poseidon_warnings():
    """Yields a list that holds, at the end, the texts of our warnings."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts.extend(str(w.message) for w in caught if "poseidon_hvd" in str(w.message))


def assert_warnings(texts: Sequence[str], expected: Sequence[str]) -> None:
    """Exactly one warning per expected fragment, in any order."""
    left = list(texts)
    for fragment in expected:
        found = next((text for text in left if fragment in text), None)
        assert found is not None, f"no warning contains {fragment!r}: {list(texts)}"
        left.remove(found)
    assert not left, f"unexpected warnings: {left}"


def relative_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference; infinite where only the reference is zero."""
    difference = (got.double() - reference).norm().item()
    scale = reference.norm().item()
    return difference / scale if scale > 0 else (0.0 if difference == 0 else float("inf"))


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()


class Run3:
    """The script under test in its three forms, step by step. ``horovod``: is there a plain form that can run it?"""

    def __init__(
        self,
        rank: Rank,
        build: Build,
        run: Run,
        *,
        dtype: torch.dtype = torch.float32,
        policy: Optional[str] = "sfb",
        schemes: Optional[Mapping[str, str]] = None,
        horovod: bool = True,
        prepare: Optional[Callable] = None,
        before: Optional[Visit] = None,
        optimizer: Callable = sgd,
        keep_grads: bool = False,
        zero: Optional[Callable] = None,
        floor: Optional[float] = None,
        times: float = 2,
        names: Callable = lambda m: m.named_parameters(),
        horovod_wrap: Optional[dict] = None,
        **wrap,
    ) -> None:
        self.rank, self.run, self.dtype, self.before, self.keep_grads = rank, run, dtype, before, keep_grads
        self.zero = zero or (lambda model, optimizer: optimizer.zero_grad())
        self.floor = FLOOR[dtype] * max(1.0, rank.size / 4) if floor is None else floor
        self.times = times
        self.op = wrap.get("op", hvd.Average)
        self.process_set = wrap.get("process_set")
        self.member = self.process_set is None or self.process_set.included()
        self.members = None if self.process_set is None else list(self.process_set.ranks)
        self.tensors = {"sfb": 0, "row-sparse": 0}  # that are to have been exchanged so
        self.steps = 0

        def make(model_dtype):
            torch.manual_seed(7)
            model = build().to(model_dtype)
            if prepare is not None:
                prepare(model)
            return model

        def arguments(model, given):  # groups are given as names
            groups = given.get("groups")
            if isinstance(groups, list):
                by_name = dict(model.named_parameters())
                given = {**given, "groups": [[by_name[name] for name in group] for group in groups]}
            return given

        self.model = make(dtype)
        self.reference = make(torch.float64)
        self.optimizer = hvd.DistributedOptimizer(
            optimizer(self.model.parameters()),
            named_parameters=names(self.model),
            policy=policy,
            schemes=schemes,
            **arguments(self.model, wrap),
        )
        self.plain_model = self.plain_optimizer = None
        if horovod:
            wrap = {
                key: value
                for key, value in wrap.items()
                if key not in ("network", "memory_limit", "dense", "reduce_in")
            }  # ours alone
            self.plain_model = make(dtype)
            given = arguments(self.plain_model, wrap if horovod_wrap is None else horovod_wrap)
            base = optimizer(self.plain_model.parameters())
            if rank.is_thread:
                self.plain_optimizer = _MeanOptimizer(rank, base, **given)
            else:
                named = names(self.plain_model)
                self.plain_optimizer = rank.horovod.DistributedOptimizer(base, named_parameters=named, **given)

    def _context(self, kind: str, index: int) -> Step:
        dtype = torch.float64 if kind == "reference" else self.dtype
        optimizer = {"horovod": self.plain_optimizer, "poseidon": self.optimizer}.get(kind)
        return Step(self.rank, index, kind, dtype, self.dtype, optimizer)

    def _take_over(self, model: torch.nn.Module) -> None:
        """The state of the model under test, so that every step starts from the same point in all three runs."""
        model.load_state_dict(self.model.state_dict())
        for p, source in zip(model.parameters(), self.model.parameters()):
            p.grad = source.grad.to(p.dtype, copy=True) if self.keep_grads and source.grad is not None else None

    def _reference_gradients(self, index: int) -> dict[str, Optional[torch.Tensor]]:
        self._take_over(self.reference)
        if self.before is not None:
            self.before(self.reference, index)
        self.run(self.reference, self._context("reference", index))
        local: dict[str, Optional[torch.Tensor]] = {}
        for name, p in self.reference.named_parameters():
            if p.requires_grad or p.grad is not None:
                local[name] = dense(p.grad) if p.grad is not None else torch.zeros_like(p).detach()
            else:
                local[name] = None
        if not self.member:
            return local
        flat = torch.cat([g.reshape(-1) for g in local.values() if g is not None])
        reduced = iter(
            self.rank.reduce(flat, op=self.op, process_set=self.process_set).split(
                [g.numel() for g in local.values() if g is not None]
            )
        )
        return {name: None if g is None else next(reduced).view(g.shape) for name, g in local.items()}

    def _plain_errors(self, index: int, reference: Mapping[str, Optional[torch.Tensor]]) -> dict[str, float]:
        if self.plain_model is None:
            return {}
        self._take_over(self.plain_model)
        if self.before is not None:
            self.before(self.plain_model, index)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.run(self.plain_model, self._context("plain" if self.rank.is_thread else "horovod", index))
            self.plain_optimizer.synchronize()
        return {
            name: relative_error(dense(p.grad), reference[name])
            for name, p in self.plain_model.named_parameters()
            if p.grad is not None and reference[name] is not None
        }

    def step(self, index: int) -> None:
        """Runs one step in all forms, compares gradients after ``synchronize()``, and lets the optimizer step."""
        if not self.keep_grads:
            self.zero(self.model, self.optimizer)
        reference = self._reference_gradients(index)
        plain = self._plain_errors(index, reference)
        for scheme in self.tensors:
            self.tensors[scheme] += list(schemes_of(self.optimizer).values()).count(scheme)
        if self.before is not None:
            self.before(self.model, index)
        self.run(self.model, self._context("poseidon", index))
        self.optimizer.synchronize()
        self.compare(index, reference, plain)
        self.rank.assert_same_everywhere(
            [p.grad for p in self.model.parameters()], f"gradients of step {index}", self.members
        )
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.rank.assert_same_everywhere(self.model.parameters(), f"parameters after step {index}", self.members)
        self.steps += 1

    def compare(self, index: int, reference: Mapping[str, Optional[torch.Tensor]], plain: Mapping[str, float]) -> None:
        wrong = []
        for name, p in self.model.named_parameters():
            if reference[name] is None:
                if p.grad is not None and p.grad.count_nonzero() > 0:
                    wrong.append(f"{name}: has a gradient although it wants none")
                continue
            if p.grad is None:
                wrong.append(f"{name}: no gradient")
                continue
            error = relative_error(dense(p.grad), reference[name])
            limit = max(self.times * plain.get(name, 0.0), self.floor)
            if not error <= limit:
                wrong.append(f"{name}: relative error {error:.2e}, limit {limit:.2e}, plain {plain.get(name)}")
        assert not wrong, f"step {index}, {schemes_of(self.optimizer)}:\n" + "\n".join(wrong)

    def finish(self, expect: Mapping[str, str]) -> None:
        """The schemes that the run ended with, and that what they say really happened."""
        if not self.member:
            return
        assert_schemes(self.optimizer, expect)
        stats = self.optimizer.stats()
        assert stats["steps"] == self.steps, stats
        for scheme, tensors in self.tensors.items():
            assert stats["schemes"][scheme]["tensors"] == tensors, (stats, self.tensors)
            assert (stats["schemes"][scheme]["collectives"] > 0) == (tensors > 0), stats


def check(
    rank: Rank,
    build: Build,
    run: Run,
    *,
    expect: Mapping[str, str],
    steps: int = 4,
    warns: Sequence[str] = (),
    **options,
) -> Run3:
    """Exactness of every step, schemes at the end, and exactly the expected warnings.

    Args:
        build: makes the model, in any dtype; called under a fixed seed.
        run: forward and backward of one step, any number of passes, on a model of ``step.dtype``.
        expect: pattern of parameter names -> scheme at the end.
        warns: fragments, one per warning that we are to give.
        options: of ``Run3`` and of ``DistributedOptimizer``.
    """
    with poseidon_warnings() as texts:
        runs = Run3(rank, build, run, **options)
        for index in range(steps):
            runs.step(index)
    assert_warnings(texts, warns)
    runs.finish(expect)
    return runs


def expect_error(rank: Rank, kind: type, fragments: Sequence[str], action: Callable[[], Any]) -> str:
    """``action`` raises ``kind`` on this rank, with all fragments in its message."""
    try:
        action()
    except kind as error:
        text = str(error)
        missing = [fragment for fragment in fragments if fragment not in text]
        assert not missing, f"{kind.__name__} does not say {missing}: {text}"
        return text
    raise AssertionError(f"no {kind.__name__}")


Wrap = Callable[..., Any]
Script = Callable[[Wrap, Step], Sequence[tuple[str, torch.Tensor]]]


class _MeanOptimizer:
    """What a distributed optimizer is to do, in the plainest way: mean over ranks at ``synchronize()``, then the
    base step.
    """

    def __init__(
        self,
        rank: Rank,
        base: torch.optim.Optimizer,
        named_parameters=None,
        *,
        op=None,
        compression=hvd.Compression.none,
        process_set=None,
        **unused,
    ) -> None:
        self.rank, self.base, self.op, self.compression, self.process_set = rank, base, op, compression, process_set
        self._skip = False

    def __getattr__(self, name):
        return getattr(self.base, name)

    def zero_grad(self, *args, **kwargs):
        self.base.zero_grad(*args, **kwargs)

    def synchronize(self):
        if self.process_set is not None and not self.process_set.included():
            return
        for group in self.base.param_groups:
            for p in group["params"]:
                if not p.requires_grad:
                    continue
                grad = torch.zeros_like(p).detach() if p.grad is None else dense(p.grad)
                sent, context = self.compression.compress(grad)
                mean = self.rank.reduce(sent.double(), op=self.op, process_set=self.process_set).to(sent.dtype)
                p.grad = self.compression.decompress(mean, context)

    @contextmanager
    def skip_synchronize(self):
        self._skip = True
        yield
        self._skip = False

    def step(self, closure=None):
        if closure is None:
            if not self._skip:
                self.synchronize()
            return self.base.step()

        def synchronized():
            loss = closure()
            self.synchronize()
            return loss

        return self.base.step(synchronized)


def trajectories(
    rank: Rank,
    script: Script,
    *,
    horovod: bool = True,
    floor: float = 2e-6,
    warns: Sequence[str] = (),
    policy: str = "sfb",
) -> None:
    """A whole training script in its three forms ends at the same parameters.

    The script is called with ``wrap(optimizer, named_parameters=..., ...)`` and a ``Step`` for data and dtype; it
    returns named tensors. Errors are relative to the tensors themselves, so ``floor`` stands for the rounding of some
    ten updates in float32.
    """

    def results(kind, dtype, wrap):
        torch.manual_seed(7)
        return {
            name: tensor.detach().clone() for name, tensor in script(wrap, Step(rank, 0, kind, dtype, torch.float32))
        }

    def mean_optimizer(*args, **kw):
        return _MeanOptimizer(rank, *args, **kw)

    def exact_optimizer(*args, **kw):
        return mean_optimizer(*args, **{**kw, "compression": hvd.Compression.none})

    reference = results("reference", torch.float64, exact_optimizer)
    plain = {}
    if horovod:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = (
                results("plain", torch.float32, mean_optimizer)
                if rank.is_thread
                else results("horovod", torch.float32, rank.horovod.DistributedOptimizer)
            )
    with poseidon_warnings() as texts:
        ours = results(
            "poseidon", torch.float32, lambda *args, **kw: hvd.DistributedOptimizer(*args, policy=policy, **kw)
        )
    rank.assert_same_everywhere(ours.values(), "results")
    wrong = []
    for name, tensor in ours.items():
        error = relative_error(tensor, reference[name])
        limit = max(floor, 2 * relative_error(plain[name], reference[name]) if horovod else 0.0)
        if not error <= limit:
            wrong.append(f"{name}: relative error {error:.2e}, limit {limit:.2e}")
    assert not wrong, "\n".join(wrong)
    assert_warnings(texts, warns)
