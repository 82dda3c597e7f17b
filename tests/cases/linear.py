"""Linear layers of every form: shapes of input, bias, calls per step, rows per rank."""

import torch
from harness.compare import check
from harness.registry import BOTH, case
from torch.nn import Linear, ReLU, Sequential, Tanh
from torch.nn import functional as F


def mlp(bias=True):
    return Sequential(Linear(12, 32, bias=bias), ReLU(), Linear(32, 24, bias=bias), Tanh(), Linear(24, 10, bias=bias))


def loss_of(y):
    """Smooth, and defined without rows."""
    return (y.tanh() * y).sum() / 16


def train(*shape, salt=0):
    """One pass over an input of that shape; a callable shape gets the step."""

    def run(m, t):
        sizes = shape[0](t) if callable(shape[0]) else shape
        loss_of(m(t.x(*sizes, salt=salt))).backward()

    return run


@case(**BOTH)
def mlp_with_bias(rank):
    check(rank, mlp, train(16, 12), expect={"*": "sfb"})


@case
def mlp_without_bias(rank):
    check(rank, lambda: mlp(bias=False), train(16, 12), expect={"*": "sfb"})


@case(**BOTH)
def cross_entropy_mlp(rank):
    def run(m, t):
        F.cross_entropy(m(t.x(8 + rank.rank, 12)), t.ids(10, 8 + rank.rank)).backward()

    check(rank, mlp, run, expect={"*": "sfb"})


@case
def input_of_rank_1(rank):
    check(rank, mlp, train(12), expect={"*": "sfb"})


@case
def input_of_rank_3(rank):
    check(rank, mlp, train(3, 5, 12), expect={"*": "sfb"})


@case
def input_of_rank_4(rank):
    check(rank, mlp, train(2, 3, 2, 12), expect={"*": "sfb"})


@case
def input_of_changing_rank(rank):
    shapes = [(12,), (4, 12), (2, 3, 12), (1, 2, 2, 12), (12,)]
    check(rank, mlp, train(lambda t: shapes[t.index]), expect={"*": "sfb"}, steps=5)


@case
def one_row(rank):
    check(rank, mlp, train(1, 12), expect={"*": "sfb"})


@case
def layers_of_extreme_shapes(rank):
    def build():
        return Sequential(Linear(12, 1), Linear(1, 1), Linear(1, 300), Linear(300, 3, bias=False))

    check(rank, build, train(6, 12), expect={"*": "sfb"})


@case
def several_calls_of_different_rows(rank):
    class Siamese(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = Linear(12, 20)
            self.head = Linear(20, 4)

        def forward(self, x):
            return self.head(self.lin(x[:3]).sum(0) + self.lin(x[3:]).sum(0) + self.lin(x[0]))

    check(rank, Siamese, train(9, 12), expect={"*": "sfb"})


@case
def forward_without_backward_between(rank):
    """A forward whose output is dropped must not be paired with another one's gradient."""

    def run(m, t):
        dropped = m(t.x(5, 12, salt=1))
        y = m(t.x(7, 12))
        m(t.x(2, 12, salt=2))
        loss_of(y).backward()
        del dropped

    check(rank, mlp, run, expect={"*": "sfb"})


@case
def part_of_the_outputs_used(rank):
    def run(m, t):
        a, b, c = m(t.x(5, 12)), m(t.x(6, 12, salt=1)), m(t.x(7, 12, salt=2))
        loss_of(a + 0 * c.sum()).backward()
        del b

    check(rank, mlp, run, expect={"*": "sfb"})


@case(**BOTH)
def unequal_rows(rank):
    check(rank, mlp, train(lambda t: (3 + 2 * ((rank.rank + t.index) % rank.size), 12)), expect={"*": "sfb"}, steps=5)


@case
def growing_and_shrinking_rows(rank):
    rows = [2, 100, 1, 300, 0, 3]
    check(rank, mlp, train(lambda t: (rows[t.index], 12)), expect={"*": "sfb"}, steps=6)


@case
def no_rows_on_one_rank(rank):
    check(rank, mlp, train(lambda t: (0 if rank.rank == t.index % rank.size else 6, 12)), expect={"*": "sfb"}, steps=5)


@case
def no_rows_on_any_rank(rank):
    check(rank, mlp, train(lambda t: (0 if t.index == 2 else 6, 12)), expect={"*": "sfb"})


@case
def no_rows_in_the_profiling_step(rank):
    check(rank, mlp, train(lambda t: (0 if t.index == 0 else 6, 12)), expect={"*": "sfb"})


@case
def no_backward_on_any_rank(rank):
    def run(m, t):
        if t.index != 2:
            loss_of(m(t.x(6, 12))).backward()

    check(rank, mlp, run, expect={"*": "sfb"})


@case
def strided_inputs_and_gradients(rank):
    """Transposed and expanded inputs, gradients that autograd hands out expanded or transposed."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = Linear(12, 20), Linear(20, 20), Linear(20, 4)

        def forward(self, x):
            y = self.a(x.t())
            z = self.b(y[:1].expand(7, 20)) + self.b(y[::2][:1])
            return self.c(z.t()[:, :5].t()).sum()

    check(rank, Model, lambda m, t: m(t.x(12, 9)).backward(), expect={"*": "sfb"})


@case
def input_that_wants_a_gradient(rank):
    def run(m, t):
        x = t.x(5, 12).requires_grad_()
        loss_of(m(x)).backward()
        assert x.grad is not None and x.grad.shape == x.shape

    check(rank, mlp, run, expect={"*": "sfb"})


@case
def functional_linear(rank):
    """Weights without a Linear module: Poseidon owns parameters, not modules."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(20, 12) / 4)
            self.b = torch.nn.Parameter(torch.randn(20))
            self.v = torch.nn.Parameter(torch.randn(20, 6) / 4)

        def forward(self, x):
            return F.linear(x, self.w, self.b).tanh() @ self.v

    check(rank, Model, train(6, 12), expect={"w": "sfb", "b": "sfb", "v": "allreduce"})


@case(**BOTH)
def convolutions_stay_dense(rank):
    def build():
        return Sequential(
            torch.nn.Conv2d(1, 4, 3), ReLU(), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), Linear(144, 10)
        )

    check(rank, build, train(5, 1, 8, 8), expect={"0.*": "allreduce", "2.*": "allreduce", "4.*": "sfb"})


@case
def channels_last_model(rank):
    """Strided gradients raise in plain Horovod; here only the float64 reference counts."""

    def build():
        return Sequential(torch.nn.Conv2d(3, 4, 3), ReLU(), torch.nn.Flatten(), Linear(144, 10)).to(
            memory_format=torch.channels_last
        )

    def run(m, t):
        loss_of(m(t.x(5, 3, 8, 8).to(memory_format=torch.channels_last))).backward()

    check(rank, build, run, expect={"0.*": "allreduce", "3.*": "sfb"}, horovod=False)


@case(**BOTH)
def recurrent_layers(rank):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(6, 8, num_layers=2)
            self.gru = torch.nn.GRU(8, 8, bidirectional=True)
            self.head = Linear(16, 3)

        def forward(self, x):
            return self.head(self.gru(self.lstm(x)[0])[0])

    # Which of the recurrent weights pass through aten::linear is PyTorch's affair; all gradients must be right either
    # way.
    check(rank, Model, train(5, 3, 6), expect={"head.*": "sfb"})


@case
def backward_order_differs_from_forward_order(rank):
    class Skip(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.skip = Linear(12, 12), Linear(12, 12), Linear(12, 4), Linear(12, 4)

        def forward(self, x):
            side = self.skip(x)
            return self.c(torch.relu(self.b(torch.relu(self.a(x)))) + x) * side

    check(rank, Skip, train(6, 12), expect={"*": "sfb"})


@case
def gradient_buffers_are_kept(rank):
    """zero_grad() frees the gradients; their memory is used again in the next step, though Python has seen them."""
    addresses = []

    def zero(m, o):
        if m[0].weight.grad is not None:
            addresses.append([p.grad.data_ptr() for p in m.parameters()])
        o.zero_grad()

    check(rank, mlp, train(6, 12), expect={"*": "sfb"}, zero=zero, steps=6)
    assert len(addresses) == 5 and all(a == addresses[1] for a in addresses[1:]), addresses


@case
def many_layers(rank):
    def build():
        return Sequential(*[layer for _ in range(20) for layer in (Linear(16, 16), Tanh())])

    check(rank, build, train(6, 16), expect={"*": "sfb"})
