"""Weights whose gradient comes, wholly or in part, from elsewhere than their own linear calls."""

import sys

import torch
from harness.compare import check
from harness.registry import BOTH, case
from torch.nn import Linear, Module, Parameter, Sequential
from torch.nn import functional as F

from cases.linear import loss_of, mlp, train

ONE_STOP = ("its gradient came from elsewhere",)
REFUSED = "sfb was asked for but cannot be"


def with_penalty(when, which="2.weight", also_rows=True):
    """A pass of the MLP, plus 0.1 |p|^2 at the (step, rank) for which ``when`` is true."""

    def run(m, t):
        loss = loss_of(m(t.x(7, 12))) if also_rows or not when(t) else 0.0
        if when(t):
            loss = loss + 0.1 * dict(m.named_parameters())[which].pow(2).sum()
        loss.backward()

    return run


@case
def l2_from_the_first_step(rank):
    check(
        rank,
        mlp,
        with_penalty(lambda t: True),
        expect={"2.*": "allreduce", "0.*": "sfb", "4.*": "sfb"},
        warns=[REFUSED],
    )


@case
def l2_from_the_first_step_on_one_rank(rank):
    check(
        rank,
        mlp,
        with_penalty(lambda t: rank.rank == rank.size - 1),
        expect={"2.*": "allreduce", "0.*": "sfb", "4.*": "sfb"},
        warns=[REFUSED],
    )


@case
def l2_from_step_3(rank):
    check(
        rank,
        mlp,
        with_penalty(lambda t: t.index >= 3),
        expect={"2.*": "allreduce", "0.*": "sfb", "4.*": "sfb"},
        steps=6,
        warns=ONE_STOP,
    )


@case(**BOTH)
def l2_at_step_3_on_one_rank(rank):
    check(
        rank,
        mlp,
        with_penalty(lambda t: t.index == 3 and rank.rank == 1),
        expect={"2.*": "allreduce", "0.*": "sfb"},
        steps=6,
        warns=ONE_STOP,
    )


@case
def l2_of_the_bias_at_step_3(rank):
    check(
        rank,
        mlp,
        with_penalty(lambda t: t.index == 3 and rank.rank == 1, "2.bias"),
        expect={"2.*": "allreduce"},
        steps=6,
        warns=ONE_STOP,
    )


@case
def l2_of_the_bias_from_the_first_step(rank):
    """Then the weight's factors do without it."""
    check(
        rank,
        mlp,
        with_penalty(lambda t: True, "2.bias"),
        expect={"2.bias": "allreduce", "2.weight": "sfb", "0.*": "sfb"},
    )


@case
def l2_without_rows_at_step_3(rank):
    check(
        rank,
        mlp,
        with_penalty(lambda t: t.index == 3, also_rows=False),
        expect={"2.*": "allreduce", "0.*": "sfb"},
        steps=6,
        warns=ONE_STOP,
    )


@case
def l2_without_rows_at_step_3_on_one_rank(rank):
    check(
        rank,
        mlp,
        with_penalty(lambda t: t.index == 3 and rank.rank == 0, also_rows=False),
        expect={"2.*": "allreduce", "0.*": "sfb"},
        steps=6,
        warns=ONE_STOP,
    )


@case
def l2_under_op_sum(rank):
    check(rank, mlp, with_penalty(lambda t: t.index == 2), expect={"2.*": "sfb"}, warns=ONE_STOP, op=rank.horovod.Sum)


@case(**BOTH)
def l2_under_predivide(rank):
    check(
        rank,
        mlp,
        with_penalty(lambda t: t.index == 2),
        expect={"2.*": "sfb"},
        warns=ONE_STOP,
        gradient_predivide_factor=2.0,
    )


@case
def l2_under_fp16_compression(rank):
    check(
        rank,
        mlp,
        with_penalty(lambda t: t.index == 2 and rank.rank == 0),
        expect={"2.*": "sfb"},
        warns=ONE_STOP,
        compression=rank.horovod.Compression.fp16,
    )


@case
def l2_in_bfloat16(rank):
    check(
        rank,
        mlp,
        with_penalty(lambda t: t.index == 2 and rank.rank == 0),
        expect={"2.*": "sfb"},
        warns=ONE_STOP,
        dtype=torch.bfloat16,
        horovod_wrap={"compression": rank.horovod.Compression.fp16},
    )


@case
def l2_of_all_weights_at_once(rank):
    def run(m, t):
        loss = loss_of(m(t.x(7, 12)))
        if t.index == 2:
            loss = loss + 0.1 * sum(p.pow(2).sum() for p in m.parameters())
        loss.backward()

    check(rank, mlp, run, expect={"*": "sfb"}, warns=ONE_STOP * 3)


@case
def l2_in_a_backward_of_its_own(rank):
    """Before and after the main pass, within backward_passes_per_step=2."""

    def run(m, t):
        penalty = 0.1 * m[2].weight.pow(2).sum()
        if t.index == 2:
            penalty.backward()
        loss_of(m(t.x(7, 12))).backward()
        if t.index == 3:
            penalty.backward()

    check(
        rank, mlp, run, expect={"2.*": "allreduce", "0.*": "sfb"}, steps=5, warns=ONE_STOP, backward_passes_per_step=2
    )


@case
def frozen_penalty_tensor_alive(rank):
    """A second graph over the weight that is alive but not part of the backward must not delay or change anything."""

    def run(m, t):
        alive = m[2].weight.pow(2).sum()
        loss_of(m(t.x(7, 12))).backward()
        assert alive.requires_grad

    check(rank, mlp, run, expect={"*": "sfb"})


class Tied(Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 12)
        self.mid = Linear(12, 12)
        self.out = Linear(12, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(torch.tanh(self.mid(self.embed(ids))))


@case(**BOTH)
def tied_with_an_embedding(rank):
    check(
        rank,
        Tied,
        lambda m, t: loss_of(m(t.ids(20, 3, 5))).backward(),
        expect={"embed.weight": "allreduce", "mid.*": "sfb"},
        warns=[REFUSED],
    )


@case
def tied_with_an_embedding_that_starts_later(rank):
    def run(m, t):
        x = m.embed(t.ids(20, 6)) if t.index >= 2 else t.x(6, 12)
        loss_of(m.out(torch.tanh(m.mid(x)))).backward()

    check(rank, Tied, run, expect={"embed.weight": "allreduce", "mid.*": "sfb"}, warns=ONE_STOP)


class Shared(Module):
    def __init__(self, bias, share_bias=False):
        super().__init__()
        self.a, self.b = Linear(12, 12, bias=bias), Linear(12, 12, bias=bias)
        self.b.weight = self.a.weight
        if share_bias:
            self.b.bias = self.a.bias

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


@case
def shared_by_two_modules(rank):
    """All of the weight's gradient is covered by factors of its calls, so SFB is right."""
    check(rank, lambda: Shared(bias=False), train(6, 12), expect={"a.weight": "sfb"})


@case
def shared_by_two_modules_with_one_bias(rank):
    check(rank, lambda: Shared(bias=True, share_bias=True), train(6, 12), expect={"a.*": "sfb"})


@case
def shared_by_two_modules_with_own_biases(rank):
    check(rank, lambda: Shared(bias=True), train(6, 12), expect={"*weight": "sfb", "*bias": "allreduce"})


@case
def bias_shared_by_two_weights(rank):
    class Model(Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Linear(12, 12), Linear(12, 12)
            self.b.bias = self.a.bias

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    check(rank, Model, train(6, 12), expect={"*weight": "sfb", "*bias": "allreduce"})


@case
def bias_used_in_one_of_two_calls(rank):
    class Model(Module):
        def __init__(self):
            super().__init__()
            self.a = Linear(12, 12)

        def forward(self, x):
            return F.linear(torch.tanh(self.a(x)), self.a.weight)

    check(rank, Model, train(6, 12), expect={"*weight": "sfb", "*bias": "allreduce"})


@case
def bias_dropped_later(rank):
    """Calls without the bias after a plan with it: its gradient must not contain their rows."""

    def run(m, t):
        bias = m.bias if t.index < 2 or (t.index == 3 and rank.rank == 0) else None
        loss_of(F.linear(t.x(5, 12), m.weight, bias)).backward()

    check(rank, lambda: Linear(12, 20), run, expect={"weight": "allreduce"}, warns=ONE_STOP)


@case
def bias_added_later(rank):
    class Model(Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = Parameter(torch.randn(20, 12)), Parameter(torch.zeros(20))

    def run(m, t):
        loss_of(F.linear(t.x(5, 12), m.weight, m.bias if t.index >= 2 else None)).backward()

    check(rank, Model, run, expect={"weight": "sfb", "bias": "allreduce"})


@case
def bias_exchanged_later(rank):
    class Model(Module):
        def __init__(self):
            super().__init__()
            self.weight = Parameter(torch.randn(20, 12))
            self.first, self.second = Parameter(torch.zeros(20)), Parameter(torch.zeros(20))

    def run(m, t):
        loss_of(F.linear(t.x(5, 12), m.weight, m.second if t.index == 2 and rank.rank == 0 else m.first)).backward()

    check(rank, Model, run, expect={"weight": "sfb"}, warns=ONE_STOP)


@case
def bias_that_is_computed(rank):
    """The bias of the call is no leaf: its gradient goes on through the graph."""

    class Model(Module):
        def __init__(self):
            super().__init__()
            self.weight, self.shift = Parameter(torch.randn(20, 12)), Parameter(torch.zeros(20))

        def forward(self, x):
            return F.linear(x, self.weight, 2 * self.shift)

    check(rank, Model, train(5, 12), expect={"weight": "sfb", "shift": "allreduce"})


@case
def weight_also_used_by_a_matmul(rank):
    def run(m, t):
        x = t.x(6, 12)
        y = m[0](x)
        if t.index >= 2:
            y = y + x @ m[0].weight.t()
        loss_of(y).backward()

    check(rank, lambda: Sequential(Linear(12, 20)), run, expect={"*": "allreduce"}, warns=ONE_STOP)


@case
def weight_used_before_and_after_its_calls(rank):
    """Extra parts that autograd adds before, between and after the captured calls."""

    def run(m, t):
        w, x = m[0].weight, t.x(6, 12)
        if t.index < 2:
            loss_of(m[1](torch.tanh(m[0](x)))).backward()
            return
        early = x + w.pow(2).sum() * 0.01
        y = m[1](torch.tanh(m[0](early) + m[0](x)))
        loss_of(y * w.sum()).backward()

    check(
        rank,
        lambda: Sequential(Linear(12, 12), Linear(12, 12)),
        run,
        expect={"0.*": "allreduce", "1.*": "sfb"},
        warns=ONE_STOP,
    )


@case
def transformer_encoder_layer(rank):
    """Attention's output projection passes its weight to a functional kernel: whatever its scheme, the gradient must
    be right.
    """

    def build():
        return torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)

    check(rank, build, train(5, 3, 16), expect={"linear1.*": "sfb", "linear2.*": "sfb", "norm1.*": "allreduce"})


@case
def transformer_batch_first_without_fast_path(rank):
    def build():
        layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
        return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    check(rank, build, train(3, 5, 16), expect={"layers.*.linear?.*": "sfb"})


@case
def in_projection_as_three_linears(rank):
    """kdim/vdim differ from the embedding: attention projects with three weights and one bias, of which it passes
    slices.
    """

    class Model(Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(12, 2, kdim=8, vdim=6)

        def forward(self, q, k, v):
            return self.attention(q, k, v)[0]

    def run(m, t):
        loss_of(m(t.x(4, 3, 12), t.x(5, 3, 8, salt=1), t.x(5, 3, 6, salt=2))).backward()

    check(rank, Model, run, expect={"attention.in_proj_bias": "allreduce"})


@case
def more_rows_than_one_collective_takes(rank):
    """Every rank multiplies its own factors then and sends the product as an extra gradient; the layer is dense
    until it is looked at again.
    """
    module = sys.modules["poseidon_hvd.optimizer"]
    module._MAX_GATHERED_ELEMENTS = 10
    try:
        check(
            rank, mlp, train(6, 12), expect={"*": "allreduce"}, steps=3, warns=["its gradient came from elsewhere"] * 3
        )
    finally:
        module._MAX_GATHERED_ELEMENTS = None
