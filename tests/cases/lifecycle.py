"""Around the training loop: copies, checkpoints, wrapping again, memory, forked workers."""

import copy
import gc
import io
import pickle
import weakref

import torch
from harness.compare import (
    Run3,
    assert_schemes,
    check,
    poseidon_warnings,
    relative_error,
    schemes_of,
    sgd,
    trajectories,
)
from harness.registry import BOTH, case
from torch.nn import Linear, Sequential

import poseidon_hvd as hvd
from cases.linear import loss_of, mlp, train


def trained(rank, steps=3, policy="sfb", **wrap):
    torch.manual_seed(7)
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy=policy, **wrap)
    for step in range(steps):
        one_step(rank, model, optimizer, step)
    return model, optimizer


def one_step(rank, model, optimizer, step, rows=6):
    """Compares with the float64 mean of local gradients, and with nothing else."""
    optimizer.zero_grad()
    x = rank.random(step, rows, 12).float()
    reference = copy.deepcopy(model).double()
    reference.zero_grad()
    loss_of(reference(x.double())).backward()
    loss_of(model(x.to(next(model.parameters()).dtype))).backward()
    optimizer.synchronize()
    for (name, p), q in zip(model.named_parameters(), reference.parameters()):
        error = relative_error(p.grad, rank.reduce(q.grad))
        assert error < 1e-6, f"{name}, step {step}: relative error {error:.2e}"
    with optimizer.skip_synchronize():
        optimizer.step()
    rank.assert_same_everywhere(model.parameters(), f"parameters after step {step}")


@case
def no_activation_is_held(rank):
    """200 forwards without gradients, 50 with, whose outputs are dropped, then a real step."""
    model, optimizer = trained(rank)
    held = []
    for i in range(200):
        with torch.no_grad():
            x = rank.random(10 + i, 4, 12).float()
            held += [weakref.ref(x), weakref.ref(model(x))]
    for i in range(50):
        x = rank.random(300 + i, 4, 12).float().requires_grad_(i % 2 == 0)
        held += [weakref.ref(x), weakref.ref(model(x))]
    del x
    gc.collect()
    alive = [ref for ref in held if ref() is not None]
    assert not alive, f"{len(alive)} of {len(held)} tensors are still held"
    one_step(rank, model, optimizer, 3)
    assert set(schemes_of(optimizer).values()) == {"sfb"}


@case(real="memory of the process")
def memory_does_not_grow_with_steps(rank):
    import os

    import psutil

    torch.manual_seed(7)
    model = Sequential(Linear(512, 512), Linear(512, 512))
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    process = psutil.Process(os.getpid())

    def steps(count):
        for step in range(count):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model(rank.random(step, 32, 512).float())).backward()
            optimizer.step()
        gc.collect()
        return process.memory_info().rss

    before = steps(20)
    grown = steps(60) - before
    # One step allocates 2 MB of gradients and 0.3 MB of factors: a leak of either in each step would show as 18 MB at
    # least.
    assert grown < 12 * 2**20, f"{grown / 2**20:.1f} MiB more after 60 steps"


@case(**BOTH)
def dropped_optimizers_are_freed(rank):
    """And take their hooks out of service: another one on the same model works under the same names."""
    torch.manual_seed(7)
    model = mlp()
    for _ in range(3):
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
        for step in range(3):
            one_step(rank, model, optimizer, step)
        assert set(schemes_of(optimizer).values()) == {"sfb"}
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None


@case
def model_that_dies_with_graphs_alive(rank):
    """Backward of a graph whose optimizer is gone: ordinary gradients."""
    model, optimizer = trained(rank)
    x = rank.random(5, 6, 12).float()
    loss = loss_of(model(x))
    reference = copy.deepcopy(model)
    loss_of(reference(x)).backward()
    model.zero_grad()
    del optimizer
    gc.collect()
    loss.backward()
    for p, q in zip(model.parameters(), reference.parameters()):
        assert p.grad is not None and relative_error(p.grad, q.grad.double()) < 1e-6


@case
def copies_of_the_model(rank):
    """deepcopy, pickle and torch.save of a model that is being trained; the copies are nobody's and compute local
    gradients.
    """
    model, optimizer = trained(rank)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        x = rank.random(9, 4, 12).float()
        twin.zero_grad()
        before = optimizer.stats()
        loss_of(twin(x)).backward()
        assert all(p.grad is not None for p in twin.parameters())
        assert not optimizer._handles
        assert optimizer.stats() == before
    one_step(rank, model, optimizer, 3)
    assert set(schemes_of(optimizer).values()) == {"sfb"}


@case
def copy_of_the_optimizer(rank):
    """deepcopy works, as in Horovod, and leaves the original alone.

    (Neither's copy can be stepped: torch copies groups and state.)
    """
    model, optimizer = trained(rank)
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert twin.param_groups[0]["params"][0] is twin_model[0].weight
    assert twin.state_dict().keys() == optimizer.state_dict().keys()
    loss_of(twin_model(rank.random(8, 3, 12).float())).backward()
    assert not optimizer._handles
    one_step(rank, model, optimizer, 3)
    assert set(schemes_of(optimizer).values()) == {"sfb"}


@case
def state_dict_round_trip(rank):
    """Straight on, or saved and loaded into a new model and optimizer: the same parameters, bit for bit (both have a
    plan).
    """
    model, optimizer = trained(rank)
    assert optimizer.state_dict().keys() == sgd(mlp().parameters()).state_dict().keys()
    fresh, other = trained(rank, steps=1)
    fresh.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        one_step(rank, model, optimizer, step)
        one_step(rank, fresh, other, step)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), fresh.parameters()))


@case
def load_state_dict_between_backward_and_step(rank):
    """Forgets the step, also with factors in flight (elastic recovery relies on it)."""
    model, optimizer = trained(rank)
    saved = copy.deepcopy(optimizer.state_dict())
    for step in range(3, 6):
        loss_of(model(rank.random(step, 6, 12, salt=9).float())).backward()
        optimizer.load_state_dict(saved)
        assert not optimizer._handles
        optimizer.zero_grad()
        one_step(rank, model, optimizer, step)
    assert set(schemes_of(optimizer).values()) == {"sfb"}


@case
def state_of_a_stepped_optimizer_is_dropped_as_in_horovod(rank):
    """Scripts rely on it: broadcast_optimizer_state before wrapping leaves the state of a step that never was."""

    def script(wrap, t):
        m = mlp().to(t.dtype)
        base = sgd(m.parameters())
        for step in range(3):
            base.zero_grad()
            generator = torch.Generator().manual_seed(step)
            loss_of(m(torch.randn(6, 12, generator=generator, dtype=torch.float64).float().to(t.dtype))).backward()
            base.step()
        base.zero_grad()
        if t.kind in ("reference", "plain"):
            base.state.clear()
        o = wrap(base, named_parameters=list(m.named_parameters()))
        for step in range(3):
            o.zero_grad()
            loss_of(m(rank.random(step, 6, 12).float().to(t.dtype))).backward()
            o.step()
        return list(m.named_parameters())

    trajectories(rank, script)


@case(**BOTH)
def wrapping_again(rank):
    """The wrapped optimizer wrapped once more: reduced once, class and state kept."""
    model, optimizer = trained(rank)
    again = hvd.DistributedOptimizer(optimizer, model.named_parameters(), policy="sfb")
    assert type(again).__mro__[1] is torch.optim.SGD
    for step in range(3, 7):
        one_step(rank, model, again, step)
    assert set(schemes_of(again).values()) == {"sfb"}
    assert again.state[model[0].weight]["momentum_buffer"] is not None


@case
def switching_schemes(rank):
    """allreduce, SFB, allreduce for one layer in one process; wire names differ per scheme and do not grow in
    number.
    """
    torch.manual_seed(7)
    model = mlp()
    optimizer = sgd(model.parameters())
    step = 0
    for policy in ("allreduce", "sfb", "allreduce", "sfb"):
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), policy=policy)
        for _ in range(3):
            one_step(rank, model, optimizer, step)
            step += 1
        assert_schemes(optimizer, {"*": policy})


@case
def parameters_added_later(rank):
    """Plain Horovod never synchronizes them."""
    model, optimizer = trained(rank)
    extra = Linear(10, 3)
    rank.horovod.broadcast_parameters(extra.state_dict(), 0)
    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.01})
    for step in range(3, 7):
        optimizer.zero_grad()
        loss_of(extra(model(rank.random(step, 6, 12).float()))).backward()
        optimizer.step()
        rank.assert_same_everywhere([*model.parameters(), *extra.parameters()], "parameters")


@case
def model_converted_after_wrapping(rank):
    """.double() replaces the accumulators of the parameters, and the factors are now wider than at the time of the
    plan.
    """
    model, optimizer = trained(rank)
    optimizer.zero_grad()
    model.double()
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].double()
    with poseidon_warnings():
        for step in range(3, 6):
            one_step(rank, model, optimizer, step)


@case
def data_replaced(rank):
    """``p.data = ...``, as exponential averages and quantizers do; the parameter keeps its identity."""
    model, optimizer = trained(rank)
    for step in range(3, 6):
        for p in model.parameters():
            p.data = p.data.clone()
        one_step(rank, model, optimizer, step)
    assert set(schemes_of(optimizer).values()) == {"sfb"}


@case(real="Horovod's own broadcasts")
def broadcasts_after_wrapping(rank):
    """broadcast_parameters and broadcast_optimizer_state right after wrapping: Horovod makes the state with the
    plain base step.
    """
    for kind in (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), torch.optim.Adam):
        torch.manual_seed(rank.rank)
        model = mlp()
        optimizer = hvd.DistributedOptimizer(
            kind(model.parameters(), lr=0.1 / (1 + rank.rank)), model.named_parameters(), policy="sfb"
        )
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert abs(optimizer.param_groups[0]["lr"] - 0.1) < 1e-6
        assert optimizer.stats()["steps"] == 0  # only the base optimizer's step ran
        for step in range(3):
            one_step(rank, model, optimizer, step)
        hvd.broadcast_optimizer_state(optimizer, 0)
        one_step(rank, model, optimizer, 3)


@case(real="Horovod's own broadcasts")
def broadcasts_with_nothing_to_send(rank):
    """Optimizers without state, and parameters that are frozen."""
    for make in (lambda p: torch.optim.SGD(p, lr=0.1), sgd, torch.optim.Adam):
        torch.manual_seed(rank.rank)
        model = mlp()
        model[0].requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), policy="sfb")
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.stats()["steps"] == 0
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model(rank.random(step, 6, 12).float())).backward()
            optimizer.step()
            rank.assert_same_everywhere(model.parameters(), f"parameters after step {step}")


@case(real="forks")
def forked_data_workers(rank):
    """DataLoader forks while our threads run; the workers touch tensors and exit, and training goes on."""
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return torch.nn.functional.linear(torch.ones(1, 12), torch.full((12, 12), float(index)))[0]

    model, optimizer = trained(rank)
    step = 3
    for _ in range(2):
        for rows in DataLoader(Rows(), batch_size=6, num_workers=2, multiprocessing_context="fork"):
            optimizer.zero_grad()
            loss_of(model(rows / 24 + rank.random(step, 6, 12).float())).backward()
            optimizer.step()
            rank.assert_same_everywhere(model.parameters(), "parameters")
            step += 1
    one_step(rank, model, optimizer, step)


@case(real="forks")
def forked_workers_that_use_the_model(rank):
    """As in reinforcement learning: a worker asks the model that is being trained, as it was when the worker was
    forked.
    """
    from torch.utils.data import DataLoader, Dataset

    model, optimizer = trained(rank)

    class Answers(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            with torch.set_grad_enabled(index % 2 == 0):
                return model(torch.full((12,), index / 12)).detach()

    expected = model(torch.arange(12)[:, None].expand(12, 12) / 12).detach()
    seen = []
    for step, answers in enumerate(
        DataLoader(Answers(), batch_size=6, num_workers=2, multiprocessing_context="fork"), 3
    ):
        one_step(rank, model, optimizer, step)
        seen.append(answers)
    assert len(seen) == 2 and relative_error(torch.cat(seen), expected.double()) < 1e-5
    assert set(schemes_of(optimizer).values()) == {"sfb"}


@case
def unnamed_parameters_in_two_groups(rank):
    torch.manual_seed(7)
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.05), policy="sfb")
    for step in range(3):
        one_step(rank, model, optimizer, step)
    names = list(schemes_of(optimizer))
    assert len(set(names)) == 6 and all(name.startswith("allreduce.noname.") for name in names), names


@case(**BOTH)
def order_of_parameters_differs_between_ranks(rank):
    """Names decide, as in Horovod: ranks may list the same parameters in another order."""
    torch.manual_seed(7)
    model = mlp()
    listed = list(model.named_parameters())
    if rank.rank == 1:
        listed.reverse()
    optimizer = hvd.DistributedOptimizer(sgd([p for _, p in listed]), listed, policy="sfb")
    for step in range(3):
        one_step(rank, model, optimizer, step)


@case(real="names hash by a seed of the process", threads=(2, 4))
def parameters_from_sets(rank):
    """In which every rank has an order of its own: tensors hash by address, names by a seed of the process."""
    torch.manual_seed(7)
    junk = [torch.empty(17 * (rank.rank + 1)) for _ in range(rank.rank * 50)]  # other addresses on every rank
    model = mlp()
    optimizer = hvd.DistributedOptimizer(
        sgd(list(set(model.parameters()))), set(model.named_parameters()), policy="sfb"
    )
    for step in range(4):
        one_step(rank, model, optimizer, step)
    assert set(schemes_of(optimizer).values()) == {"sfb"}
    del junk


@case
def surplus_names_and_generators(rank):
    torch.manual_seed(7)
    model, other = mlp(), mlp()
    named = (entry for entry in [*model.named_parameters(), *other.named_parameters("other")])
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named, policy="sfb")
    for step in range(3):
        one_step(rank, model, optimizer, step)


@case
def scalar_and_empty_parameters(rank):
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(2.0))
            self.empty = torch.nn.Parameter(torch.zeros(0, 3))
            self.lin = Linear(12, 4)

        def forward(self, x):
            return self.lin(x) * self.scale + self.empty.sum()

    check(rank, Odd, train(5, 12), expect={"lin.*": "sfb", "scale": "allreduce", "empty": "allreduce"})


@case(**BOTH)
def flat_gradient_buffer(rank):
    """.grad are views of one buffer, which the optimizer's results must reach (Horovod reduces in place)."""
    torch.manual_seed(7)
    model = mlp()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    offset = 0
    for p in model.parameters():
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    for step in range(4):
        flat.zero_()
        x = rank.random(step, 6, 12).float()
        reference = copy.deepcopy(model).double()
        reference.zero_grad()
        loss_of(reference(x.double())).backward()
        loss_of(model(x)).backward()
        optimizer.synchronize()
        expected = rank.reduce(torch.cat([p.grad.reshape(-1) for p in reference.parameters()]))
        assert relative_error(flat, expected) < 1e-6, f"step {step}"
        with optimizer.skip_synchronize():
            optimizer.step()
    assert set(schemes_of(optimizer).values()) == {"sfb"}


@case
def gradients_kept_by_the_user(rank):
    """A gradient that the user holds on to must not be overwritten by the next step."""
    model, optimizer = trained(rank)
    kept, copies = [], []
    for step in range(3, 7):
        one_step(rank, model, optimizer, step)
        kept.append([p.grad for p in model.parameters()])
        copies.append([p.grad.clone() for p in model.parameters()])
    for before, after in zip(copies, kept):
        assert all(torch.equal(a, b) for a, b in zip(before, after))


@case
def views_of_gradients_kept_by_the_user(rank):
    """... also when only a view or the NumPy array of it is held."""
    model, optimizer = trained(rank)
    kept, copies = [], []
    for step in range(3, 7):
        one_step(rank, model, optimizer, step)
        kept.append([p.grad.detach()[:1] for p in model.parameters()] + [p.grad.numpy() for p in model.parameters()])
        copies.append(
            [p.grad[:1].clone() for p in model.parameters()] + [p.grad.numpy().copy() for p in model.parameters()]
        )
    for before, after in zip(copies, kept):
        assert all((a == b).all() for a, b in zip(before, after))


@case
def reports(rank):
    runs = Run3(rank, mlp, train(6, 12), horovod=False)
    assert "No plan yet" in runs.optimizer.scheme_report()
    runs.step(0)
    report = runs.optimizer.scheme_report()
    assert f"{rank.size} ranks" in report and "6 of 6" in report, report
    for name, _ in runs.model.named_parameters():
        assert name in report
    before = runs.optimizer.stats()
    runs.step(1)
    stats = runs.optimizer.stats()
    assert stats["steps"] == 2
    sfb = stats["schemes"]["sfb"]
    assert sfb["tensors"] == 6 and sfb["collectives"] == 3, sfb
    # [x | d | flag] of 6 rows per rank, float32, by ring: each rank passes on (size - 1) / size of the whole.
    row_bytes = 4 * ((12 + 32 + 1) + (32 + 24 + 1) + (24 + 10 + 1))
    assert sfb["wire_bytes"] == row_bytes * 6 * (rank.size - 1), sfb
    numel = sum(p.numel() for p in runs.model.parameters())
    assert abs(sfb["horovod_wire_bytes"] - 2 * 4 * numel * (rank.size - 1) / rank.size) < 1, sfb
    assert stats["schemes"]["allreduce"] == before["schemes"]["allreduce"]
    assert all(value >= 0 for key, value in sfb.items()), sfb
