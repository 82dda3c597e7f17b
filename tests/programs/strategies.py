"""Draws programs with hypothesis. Simplest choices come first, since failures shrink towards them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from . import actions as a
from .models import FRONTS, KINDS, USES, Layer, Spec, parameter_names, sparse_parameters
from .program import OPTIMIZERS, POLICIES, Program, Settings

MOST_RANKS = 3


def _mostly(value: Any, others: Sequence[Any], weight: int) -> st.SearchStrategy:
    """The value, or one of the others in one draw of ``weight + 1``.

    Rare things are rare so that several of them seldom meet.
    """
    others = list(others)
    return st.integers(0, (weight + 1) * len(others) - 1).map(
        lambda i: others[i % len(others)] if i >= weight * len(others) else value
    )


# Half of the layers are of the kinds that factors cover.
_kinds = ["linear", "repeated", "recurrent", "tied", "wide", "checkpointed", "functional"]
_kinds = [kind for pair in zip(KINDS, _kinds * len(KINDS)) for kind in pair]
_layers = st.builds(
    Layer,
    kind=st.sampled_from(_kinds),
    bias=_mostly(True, (False,), 2),
    used=_mostly("always", USES[1:], 6),
    of=st.integers(0, 2),
)
_stacks = [st.tuples(*[_layers] * count) for count in range(4)]
_specs = st.builds(
    Spec,
    front=_mostly("features", FRONTS[1:], 1),
    layers=st.integers(0, 7).flatmap(lambda n: _stacks[(0, 1, 2, 2, 1, 3, 2, 3)[n]]),
    tied_head=_mostly(False, (True,), 3),
)
# Policy and layout of what is allreduced. What goes by time measures products first, which takes ten times as long as
# all else.
_cheap = [
    (policy, dense)
    for policy in ("sfb", "bytes", "sfb", "allreduce", "sfb")
    for dense in ("lazy", "lazy:64", "wfbp", "bsp", "horovod")
]
_dear = [
    (policy, dense)
    for dense in ("lazy:64", "merged", "priority:64", "auto")
    for policy in POLICIES
    if policy == "time" or dense[0] != "l"
]
_ways = _mostly(None, _dear, 14).flatmap(lambda way: _cheap_ways if way is None else st.just(way))
_cheap_ways = st.sampled_from(_cheap)
_settings = st.builds(
    lambda way, **more: Settings(policy=way[0], dense=way[1], **more),
    way=_ways,
    reduce_in=_mostly("backward", ("step",), 5),
    passes=_mostly(1, (2, 3), 2),
    op=_mostly("Average", ("Sum",), 5),
    predivide=_mostly(1.0, (2.0,), 9),
    compression=_mostly("none", ("fp16",), 9),
    sparse_as_dense=_mostly(False, (True,), 2),
    groups=_mostly(0, (2,), 12),
    optimizer=st.sampled_from(OPTIMIZERS),
)

# Parameters, layers and rows are drawn as numbers, whatever the model: strategies that depend on what was drawn are
# slow.
_number = st.integers(0, 23)
_rows = st.tuples(*[st.integers(0, 4).map(lambda rows: (3, 2, 1, 4, 0)[rows])] * MOST_RANKS)
_some_ranks = _mostly(None, tuple((rank,) for rank in range(MOST_RANKS)), 1)
_changes = st.sampled_from(a.EXISTING + a.EXISTING_DENSE + a.ALWAYS)
_change = st.builds(a.Change, _number, _changes, _some_ranks)
_change_everywhere = st.builds(a.Change, _number, _changes)
_hook_number = st.integers(0, 2)
_hook = st.one_of(
    st.builds(a.Hook, st.sampled_from(a.TENSOR_HOOKS), _number, _hook_number),
    st.builds(a.Hook, st.sampled_from(a.MODULE_HOOKS), _number, _hook_number),
    st.builds(a.Hook, st.sampled_from(a.OUTPUT_HOOKS), _number, _hook_number),
    st.builds(a.Unhook, _hook_number),
)
_zero = st.builds(a.Zero, st.sampled_from(a.ZEROS))
_discard = st.builds(a.Zero, _mostly("optimizer", ("optimizer, zeros", "model", "loop", "model, zeros", "mul_"), 1))
_evaluate = st.builds(a.Evaluate, st.booleans())
_freeze = st.builds(a.Freeze, _number, st.booleans())
_weigh = st.builds(a.Weigh, _number, st.sampled_from(("mul_", "data.mul_")))
_forward = st.builds(a.Forward, _rows, _mostly(None, tuple(range(24)), 7))
_backward = st.builds(a.Backward, _mostly("once", ("asked before", "by hand", "half", "in halves"), 4))
_two_passes = st.builds(a.Backward, st.sampled_from(("retained", "by terms")))
_failed = st.builds(a.FailedBackward, _rows, _mostly(0, (1, 2, 3), 5), _some_ranks, st.sampled_from(("repeat", "skip")))


def _few(strategy: st.SearchStrategy, none_in_six: int) -> st.SearchStrategy:
    return st.integers(0, 5).flatmap(lambda n: _nothing if n < none_in_six else _lists[strategy][0 if n < 5 else 1])


_nothing = st.just([])
_between_steps = st.one_of(_change, _change, _hook, _hook, _freeze, _evaluate, _weigh, st.builds(a.Convert))
_between_passes = st.one_of(
    _hook, _weigh, _evaluate, st.builds(a.Zero, st.sampled_from(("model", "model, zeros", "loop", "mul_"))), _change
)
_before_backward = st.one_of(_hook, _weigh, _evaluate)
_afterwards = st.one_of(_change_everywhere, _change_everywhere, st.builds(a.Clip), _evaluate, _hook)
_before_wrapping = st.one_of(st.builds(a.Hook, st.sampled_from(a.TENSOR_HOOKS), _number, st.just(9)), _freeze)
_lists = {
    each: (st.lists(each, min_size=1, max_size=1), st.lists(each, min_size=2, max_size=2))
    for each in (_between_steps, _between_passes, _before_backward, _afterwards, _change)
}
_some_between_steps, _some_between_passes, _some_afterwards = (
    _few(_between_steps, 3),
    _few(_between_passes, 3),
    _few(_afterwards, 2),
)
_some_before_backward, _some_changes = _few(_before_backward, 5), _few(_change, 5)
_one_in_twelve, _percent = st.integers(0, 11), st.integers(0, 99)


@st.composite
def programs(draw) -> Program:
    spec = draw(_specs)
    chosen = draw(_settings)
    sparse = bool(sparse_parameters(spec))
    chosen = dataclasses.replace(
        chosen,
        predivide=1.0 if chosen.op == "Sum" else chosen.predivide,
        sparse_as_dense=chosen.sparse_as_dense and sparse,
        optimizer="plain" if sparse else chosen.optimizer,
    )
    ranks = draw(_mostly(2, (3,), 3))
    before = [draw(_before_wrapping)] if draw(_one_in_twelve) == 11 else []
    actions: list[a.Action] = []
    for _ in range(draw(st.integers(2, 7))):
        actions += _draw_step(draw, chosen.passes)
        actions.append(a.EndStep())
    named = _Namer(spec, ranks)
    return Program(ranks, spec, chosen, tuple(map(named, actions)), tuple(map(named, before)))


def _draw_step(draw, passes: int) -> list[a.Action]:
    actions: list[a.Action] = list(draw(_some_between_steps))
    if draw(_one_in_twelve) == 11 and passes == 1:
        return actions + [a.StepWithClosure(draw(_rows))]
    kind = draw(_one_in_twelve)
    if kind < 11:
        actions.append(a.Zero() if kind < 7 else draw(_zero))
        actions += draw(_some_changes)
    # Now and then fewer than announced. More are an error, which ends the program.
    odd = draw(_percent)
    left = passes if odd < 95 else passes - 1 if odd < 99 else passes + 1
    while left > 0:
        if left < passes:
            actions += draw(_some_between_passes)
        if draw(_one_in_twelve) == 11:
            actions.append(draw(_failed))
            left -= 1
            continue
        actions.append(draw(_forward))
        actions += draw(_some_before_backward)
        if left >= 2 and draw(_one_in_twelve) >= 8:
            actions.append(draw(_two_passes))
            left -= 2
        else:
            actions.append(draw(_backward))
            left -= 1
    actions += draw(_some_afterwards)
    end = draw(_percent)
    if end < 50:
        return actions + [a.Step()]
    if end < 80:
        return actions + [a.Synchronize()] + draw(_some_afterwards) + [a.Step(skip=end < 72)]
    if end < 86:
        return actions + [a.Synchronize(), a.Synchronize(), a.Step(skip=True)]
    # Without synchronize(): what comes next may be an error, which ends the program.
    return actions + [draw(_discard) if end < 93 else a.Step(skip=True)]


class _Namer:
    """Makes numbers the names of a model's parameters, the numbers of its layers, and rows of so many ranks."""

    def __init__(self, spec: Spec, ranks: int) -> None:
        self._names, self._layers, self._ranks = parameter_names(spec), len(spec.layers), ranks

    def __call__(self, action: a.Action) -> a.Action:
        changed = {}
        for field in dataclasses.fields(action):
            value = getattr(action, field.name)
            if field.name == "rows":
                changed["rows"] = value[: self._ranks]
            elif field.name == "ranks" and value is not None:
                changed["ranks"] = (value[0] % self._ranks,)
            elif field.name == "on" and action.kind not in a.TENSOR_HOOKS:
                changed["on"] = value % self._layers if self._layers else 0
            elif field.name in ("param", "swapped", "on") and value is not None:
                changed[field.name] = self._names[value % len(self._names)]
        return dataclasses.replace(action, **changed) if changed else action
