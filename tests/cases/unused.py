"""Layers that some ranks, or none, use; frozen and unfrozen parameters."""

import torch
from harness.compare import Run3, check, expect_error, poseidon_warnings, reasons_of, sgd
from harness.registry import BOTH, case
from torch.nn import Linear, Module, Sequential, Tanh

import poseidon_hvd as hvd
from cases.linear import loss_of, mlp, train


class Heads(Module):
    def __init__(self, count=2):
        super().__init__()
        self.trunk = Linear(12, 16)
        self.heads = torch.nn.ModuleList(Linear(16, 8) for _ in range(count))

    def forward(self, x, *which):
        h = torch.tanh(self.trunk(x))
        return sum(self.heads[i](h) for i in which) if which else h


@case
def head_per_rank(rank):
    check(rank, Heads, lambda m, t: loss_of(m(t.x(6, 12), rank.rank % 2)).backward(), expect={"*": "sfb"})


@case
def head_per_rank_and_step(rank):
    check(
        rank,
        Heads,
        lambda m, t: loss_of(m(t.x(6, 12), (rank.rank + t.index) % 2)).backward(),
        expect={"*": "sfb"},
        steps=5,
    )


@case
def skipped_on_one_rank_later(rank):
    def run(m, t):
        skip = t.index >= 2 and rank.rank == 1
        loss_of(m(t.x(6, 12), *((0,) if skip else (0, 1)))).backward()

    check(rank, Heads, run, expect={"*": "sfb"})


@case
def skipped_on_all_ranks_later(rank):
    def run(m, t):
        loss_of(m(t.x(6, 12), *((0,) if t.index in (2, 3) else (0, 1)))).backward()

    check(rank, Heads, run, expect={"*": "sfb"}, steps=6)


@case
def never_used(rank):
    check(
        rank,
        Heads,
        lambda m, t: loss_of(m(t.x(6, 12), 0)).backward(),
        expect={"heads.1.*": "allreduce", "heads.0.*": "sfb", "trunk.*": "sfb"},
    )


@case
def first_used_at_step_3(rank):
    """Profiled and planned when it comes."""
    check(
        rank,
        Heads,
        lambda m, t: loss_of(m(t.x(6, 12), *((0, 1) if t.index >= 3 else (0,)))).backward(),
        steps=6,
        expect={"*": "sfb"},
    )


@case(**BOTH)
def first_used_at_step_3_on_one_rank(rank):
    check(
        rank,
        Heads,
        lambda m, t: loss_of(m(t.x(6, 12), *((0, 1) if t.index >= 3 and rank.rank == 0 else (0,)))).backward(),
        steps=6,
        expect={"*": "sfb"},
    )


@case
def seven_of_twelve_unused(rank):
    """What is flushed at synchronize() goes out in one order on all ranks, whatever the addresses."""
    junk = [torch.empty(17 * (rank.rank + 1)) for _ in range(rank.rank * 50)]  # other addresses on every rank
    used = [0, 3, 5, 8, 11]
    check(
        rank,
        lambda: Heads(12),
        lambda m, t: loss_of(m(t.x(6, 12), *(used if t.index % 2 else range(12)))).backward(),
        expect={"*": "sfb"},
        steps=6,
    )
    del junk


@case
def weight_without_gradient_through_a_detach(rank):
    def run(m, t):
        h = m[1](m[0](t.x(6, 12)))
        loss_of(m[2](h.detach() if t.index % 2 else h)).backward()

    check(rank, lambda: Sequential(Linear(12, 16), Tanh(), Linear(16, 4)), run, expect={"*": "sfb"}, steps=5)


# ---- Frozen and unfrozen


def frozen(*names):
    def prepare(m):
        for name in names:
            dict(m.named_parameters())[name].requires_grad_(False)

    return prepare


def toggle(name, when, to):
    def before(m, step):
        if step == when:
            dict(m.named_parameters())[name].requires_grad_(to)

    return before


@case
def frozen_weight(rank):
    check(rank, mlp, train(6, 12), expect={"2.*": "allreduce", "0.*": "sfb"}, prepare=frozen("2.weight"))


@case
def frozen_weight_while_a_rank_has_no_gradient_in_the_first_step(rank):
    """Rank 0 meets the others in backward(), they meet it in step(): all compare who wants a gradient, or none."""

    def run(m, t):
        if t.index > 0 or rank.rank == 0:
            loss_of(m(t.x(6, 12))).backward()

    check(rank, mlp, run, expect={"0.*": "allreduce", "2.*": "sfb"}, prepare=frozen("0.weight"))


@case
def frozen_bias(rank):
    check(
        rank,
        mlp,
        train(6, 12),
        expect={"2.weight": "sfb", "2.bias": "allreduce", "0.*": "sfb"},
        prepare=frozen("2.bias"),
    )


@case
def frozen_first_layer(rank):
    check(rank, mlp, train(6, 12), expect={"0.*": "allreduce", "2.*": "sfb"}, prepare=frozen("0.weight", "0.bias"))


@case
def weight_frozen_later(rank):
    """Its gradient is zero from then on; the bias goes on."""
    with poseidon_warnings():
        check_frozen_later(rank, "2.weight")


@case
def bias_frozen_later(rank):
    with poseidon_warnings():
        check_frozen_later(rank, "2.bias")


def check_frozen_later(rank, name):
    def before(m, step):
        if step == 3:
            dict(m.named_parameters())[name].requires_grad_(False)

    runs = Run3(rank, mlp, train(6, 12), before=before)
    for step in range(6):
        runs.step(step)
    runs.finish({"0.*": "sfb", "4.*": "sfb"})


@case(**BOTH)
def layer_frozen_later_and_thawed_again(rank):
    def before(m, step):
        for p in m[2].parameters():
            p.requires_grad_(step not in (2, 3))

    check(rank, mlp, train(6, 12), expect={"*": "sfb"}, before=before, steps=6)


@case
def weight_unfrozen_later(rank):
    """Plain Horovod never synchronizes it. Dense at first, until it has been profiled."""
    check(
        rank,
        mlp,
        train(6, 12),
        expect={"*": "sfb"},
        prepare=frozen("2.weight"),
        before=toggle("2.weight", 2, True),
        horovod=False,
        steps=5,
    )


@case
def bias_unfrozen_later(rank):
    check(
        rank,
        mlp,
        train(6, 12),
        expect={"2.weight": "sfb", "2.bias": "allreduce", "0.*": "sfb"},
        prepare=frozen("2.bias"),
        before=toggle("2.bias", 2, True),
        horovod=False,
        steps=5,
    )


@case
def model_unfrozen_later(rank):
    """Fine-tuning: a frozen trunk is thawed after some steps."""

    def before(m, step):
        m[0].requires_grad_(step >= 2)
        m[2].requires_grad_(step >= 2)

    check(rank, mlp, train(6, 12), expect={"*": "sfb"}, before=before, horovod=False, steps=5)


@case
def reasons_are_given(rank):
    runs = check(rank, Heads, lambda m, t: loss_of(m(t.x(6, 12), 0)).backward(), expect={"heads.1.*": "allreduce"})
    reasons = reasons_of(runs.optimizer)
    assert all(reasons.values()), reasons
    assert "not used" in reasons["heads.1.weight"], reasons


@case
def unfrozen_on_one_rank(rank):
    """At any step, whoever clears the gradients: an error on all ranks that names parameter and ranks, and no wait
    without end.
    """
    for when in (1, 3, 5):
        for policy in ("sfb", "allreduce"):
            torch.manual_seed(7)
            model = mlp()
            model[0].requires_grad_(False)
            optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy=policy)

            def step(index):
                optimizer.zero_grad() if index % 2 else model.zero_grad()
                loss_of(model(rank.random(index, 6, 12).float())).backward()
                optimizer.step()

            for index in range(when):
                step(index)
            if rank.rank == 1:
                model[0].requires_grad_(True)
            expect_error(
                rank,
                ValueError,
                ["0.bias", "rank 0 has one that wants none", "rank 1", "requires_grad_()"],
                lambda: step(when),
            )


@case
def unfrozen_on_all_ranks(rank):
    """One layer after the other, as in gradual unfreezing."""

    def before(model, step):
        for index, layer in enumerate((model[4], model[2], model[0])):
            layer.requires_grad_(step >= 2 * index)

    check(rank, mlp, train(6, 12), expect={"4.*": "sfb"}, before=before, steps=8)


@case
def frozen_later_on_all_ranks(rank):
    """The bias goes on alone. What is frozen keeps nobody else's gradient from being reduced in backward()."""
    for policy in ("sfb", "allreduce"):
        torch.manual_seed(7)
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy=policy)
        for index in range(6):
            model[2].weight.requires_grad_(index not in (1, 2))
            optimizer.zero_grad()
            loss_of(model(rank.random(index, 6, 12).float())).backward()
            wanting = [p.grad for p in model.parameters() if p.requires_grad]
            assert all(g is not None and g.any() for g in wanting), (policy, index)
            rank.assert_same_everywhere(wanting, f"gradients of step {index}, {policy}")
            optimizer.step()
            rank.assert_same_everywhere(model.parameters(), f"parameters after step {index}, {policy}")
