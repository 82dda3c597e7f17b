"""hvd.join() on ranks that have fewer steps than others, with uneven_steps: factors while all are there, allreduce
while one is missing.
"""

import torch
from harness.compare import expect_error, relative_error, schemes_of
from harness.registry import JOIN, case
from torch.nn import functional as F

import poseidon_hvd as hvd
from cases.embedding import Table, Words, plain_sgd
from cases.linear import loss_of, mlp

# Steps of each rank before it joins, join after join; in the last round nobody is missing.
ROUNDS = ((5, 3, 4, 3), (2, 6, 4, 6), (3, 1, 0, 2), (4, 4, 4, 4))


def train(rank, library, build, step, rounds, optimizer=plain_sgd, **wrap):
    """The parameters at the end, the optimizer, and per round how many gradients have travelled as factors or rows."""
    torch.manual_seed(7)
    model = build()
    optimizer = library.DistributedOptimizer(optimizer(model.parameters()), model.named_parameters(), **wrap)
    index, gathered = 0, []
    for counts in rounds:
        for i in range(counts[rank.rank]):
            optimizer.zero_grad()
            step(library, optimizer, model, index + i)
            optimizer.step()
        last = library.join()
        assert counts[last] == max(counts[: rank.size])
        library.broadcast_parameters(model.state_dict(), root_rank=last)
        index += max(counts)
        if library is hvd:
            gathered.append(sum(optimizer.stats()["schemes"][scheme]["tensors"] for scheme in ("sfb", "row-sparse")))
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), optimizer, gathered


def check(rank, build, step, *, rounds=ROUNDS, horovod=None, **wrap):
    """The same model as with plain Horovod; factors in each step in which all ranks took part, and in no other."""
    theirs, _, _ = train(rank, rank.horovod, build, step, rounds, **(wrap if horovod is None else horovod))
    ours, optimizer, gathered = train(rank, hvd, build, step, rounds, uneven_steps=True, **{"policy": "sfb", **wrap})
    error = relative_error(ours, theirs.double())
    assert error < 1e-6, f"relative error {error:.2e} against plain Horovod"
    factored = sum(scheme in ("sfb", "row-sparse") for scheme in schemes_of(optimizer).values())
    full = 0
    planned = 0  # the first full step runs dense
    for counts, tensors in zip(rounds, gathered):
        full += min(counts[: rank.size])
        planned = planned or min(full, 1)
        assert tensors == factored * (full - planned), (gathered, factored, rounds)
    return optimizer


def batch(rank, index, rows=6):
    return rank.random(index, rows, 12).float()


def plain(rank):
    def step(library, optimizer, model, index):
        loss_of(model(batch(rank, index))).backward()

    return step


@case(real=JOIN, seconds=120)
def linear_layers(rank):
    assert set(schemes_of(check(rank, mlp, plain(rank))).values()) == {"sfb"}


@case(real=JOIN, seconds=120)
def state_loaded_after_steps_with_missing_ranks(rank):
    """Loading a state abandons the step, and with it what was sent whole because a rank was missing."""
    backward = plain(rank)

    def step(library, optimizer, model, index):
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        backward(library, optimizer, model, index)

    check(rank, mlp, step)


@case(real=JOIN, seconds=120)
def without_bias_and_in_half_precision(rank):
    """Rounded twice on our side, rows and then their product, so the comparison is coarser than the others."""
    results = [
        train(rank, library, lambda: mlp(bias=False), plain(rank), ROUNDS, compression=hvd.Compression.fp16, **wrap)[0]
        for library, wrap in ((rank.horovod, {}), (hvd, {"policy": "sfb", "uneven_steps": True}))
    ]
    assert relative_error(results[1], results[0].double()) < 1e-3


@case(real=JOIN, seconds=120)
def several_passes(rank):
    def step(library, optimizer, model, index):
        for salt in range(2):
            loss_of(model(rank.random(index, 6, 12, salt=salt).float())).backward()

    check(rank, mlp, step, backward_passes_per_step=2)


@case(real=JOIN, seconds=120)
def fewer_passes_than_announced(rank):
    def step(library, optimizer, model, index):
        for salt in range(1 + (index + rank.rank) % 2):
            loss_of(model(rank.random(index, 6, 12, salt=salt).float())).backward()

    check(rank, mlp, step, backward_passes_per_step=2)


@case(real=JOIN, seconds=120)
def layers_that_some_ranks_do_not_use(rank):
    def step(library, optimizer, model, index):
        x = batch(rank, index)
        first = model[1](model[0](x))
        loss_of(model(x) if (index + rank.rank) % 3 else first).backward()

    check(rank, mlp, step)


@case(real=JOIN, seconds=120)
def gradients_that_are_there_before_backward(rank):
    """Zeros in steps 1 and 3, something in step 4, in which ranks are missing: in another one it would end the
    layers' factors.
    """

    def step(library, optimizer, model, index):
        if index in (1, 3, 4):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.01 if index == 4 else 0.0)
        loss_of(model(batch(rank, index))).backward()

    check(rank, mlp, step)


@case(real=JOIN, seconds=120)
def users_own_allreduce_in_every_step(rank):
    """Of the loss, on the ranks that still train."""

    def step(library, optimizer, model, index):
        loss = loss_of(model(batch(rank, index)))
        mean = library.allreduce(loss.detach(), name="joining.loss")
        (loss * (1 + 0.1 * mean)).backward()
        library.allreduce(loss.detach(), name="joining.loss.again")

    check(rank, mlp, step)


def words(rank, used=lambda index: True):
    def step(library, optimizer, model, index):
        if used(index):
            loss_of(model(rank.integers(index, 30, 9))).backward()

    return step


@case(real=JOIN, seconds=120)
def tables_with_dense_gradients(rank):
    optimizer = check(rank, Words, words(rank))
    assert schemes_of(optimizer)["embed.weight"] == "row-sparse"


@case(real=JOIN, seconds=120)
def tables_with_sparse_gradients(rank):
    """Plain Horovod gathers those and cannot go on after a join, so there they are made dense.

    Some ranks have none in some steps.
    """
    dense = {"sparse_as_dense": True}
    for policy, scheme in (("sfb", "row-sparse"), ("allreduce", "sparse_allgather")):
        step = words(rank, lambda index: index == 0 or (index + rank.rank) % 3)
        optimizer = check(rank, lambda: Table(sparse=True), step, horovod=dense, policy=policy)
        assert schemes_of(optimizer)["embed.weight"] == scheme


@case(real=JOIN, seconds=120)
def sparse_gradients_stay_sparse(rank):
    """SparseAdam takes no others."""
    for policy in ("sfb", "allreduce"):
        torch.manual_seed(7)
        model = Table(sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(list(model.parameters()), lr=0.01),
            model.named_parameters(),
            policy=policy,
            uneven_steps=True,
        )
        for index in range((5, 3, 4, 3)[rank.rank]):
            optimizer.zero_grad()
            if index == 0 or (index + rank.rank) % 2:
                loss_of(model(rank.integers(index, 30, 9))).backward()
            optimizer.synchronize()
            grad = model.embed.weight.grad
            assert grad.is_sparse and grad.sparse_dim() == 1, (policy, index)
            with optimizer.skip_synchronize():
                optimizer.step()
        hvd.join()


@case(real=JOIN, seconds=120)
def joined_before_the_first_step(rank):
    """A rank without data. The plan is made in the first step in which all take part."""
    check(rank, mlp, plain(rank), rounds=((4, 0, 2, 0), (4, 4, 4, 4)))


@case(real=JOIN, seconds=120)
def plans_are_put_off(rank):
    """They would be due at steps 3, 8 and 18."""
    optimizer = check(rank, mlp, plain(rank), rounds=((12, 2, 9, 2), (6, 6, 6, 6)))
    made = rank.horovod.allgather_object(optimizer.plan()["made_at_step"], name="joining.made")
    assert len(set(made)) == 1 and made[0] > 0, made


@case(real=JOIN, seconds=120)
def forward_and_half_a_step_before_the_join(rank):
    """A rank is bound to a step only once a gradient is complete: a forward, or one of two passes, does not count it
    among the others.
    """
    results = []
    for library, wrap in ((rank.horovod, {}), (hvd, {"policy": "sfb", "uneven_steps": True})):
        torch.manual_seed(7)
        model = mlp()
        optimizer = library.DistributedOptimizer(
            plain_sgd(model.parameters()), model.named_parameters(), backward_passes_per_step=2, **wrap
        )
        for index in range(6 if rank.rank == 0 else 3):
            optimizer.zero_grad()
            for salt in range(2):
                loss_of(model(rank.random(index, 6, 12, salt=salt).float())).backward()
            optimizer.step()
        if rank.rank == 1:
            loss_of(model(batch(rank, 50))).backward()
            model(batch(rank, 51))
        library.join()
        library.broadcast_parameters(model.state_dict(), root_rank=0)
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert relative_error(results[1], results[0].double()) < 1e-6


@case(real=JOIN)
def one_more_collective_per_step(rank):
    torch.manual_seed(7)
    model = mlp()
    optimizer = hvd.DistributedOptimizer(
        plain_sgd(model.parameters()), model.named_parameters(), policy="sfb", uneven_steps=True
    )
    counts = []
    for index in range((7, 5, 6, 5)[rank.rank]):
        optimizer.zero_grad()
        loss_of(model(batch(rank, index))).backward()
        optimizer.step()
        schemes = optimizer.stats()["schemes"]
        counts.append((schemes["allreduce"]["collectives"], schemes["sfb"]["collectives"]))
    hvd.join()
    # Six parameters in three layers. The first step is dense, and so is each in which a rank is missing.
    full = 5
    expected = [(6 + i, 3 * (i - 1)) for i in range(1, full + 1)]
    while len(expected) < len(counts):
        expected.append((expected[-1][0] + 7, expected[-1][1]))
    assert counts == expected, counts


@case(real=JOIN)
def nothing_is_counted_where_nothing_is_gathered(rank):
    torch.manual_seed(7)
    model = mlp()
    optimizer = hvd.DistributedOptimizer(
        plain_sgd(model.parameters()), model.named_parameters(), policy="allreduce", uneven_steps=True, dense="horovod"
    )
    for index in range((5, 3, 4, 3)[rank.rank]):
        optimizer.zero_grad()
        loss_of(model(batch(rank, index))).backward()
        optimizer.step()
        assert (
            optimizer.stats()["schemes"]["allreduce"]["collectives"] == 6 * (index + 1) + 1
        )  # in the step of the first plan
    hvd.join()


@case(real=JOIN)
def several_optimizers(rank):
    def run(library, **wrap):
        torch.manual_seed(7)
        models = [mlp(), mlp()]
        optimizers = [
            library.DistributedOptimizer(
                plain_sgd(m.parameters()), [(f"{i}.{n}", p) for n, p in m.named_parameters()], **wrap
            )
            for i, m in enumerate(models)
        ]
        for index in range((5, 3, 4, 3)[rank.rank]):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(models[1](models[0](batch(rank, index)).repeat(1, 2)[:, :12])).backward()
            for optimizer in optimizers:
                optimizer.step()
        library.join()
        for model in models:
            library.broadcast_parameters(model.state_dict(), root_rank=0)
        return torch.cat([p.detach().reshape(-1) for m in models for p in m.parameters()])

    theirs, ours = run(rank.horovod), run(hvd, policy="sfb", uneven_steps=True)
    assert relative_error(ours, theirs.double()) < 1e-6


@case(real=JOIN)
def weighed_by_samples(rank):
    """Ranks that have joined count no samples."""

    def step(library, optimizer, model, index):
        x = batch(rank, index, rows=2 + (index + rank.rank) % 3)
        loss = F.mse_loss(model(x), torch.zeros(len(x), 10))
        if library is hvd:
            loss = optimizer.weigh(loss, len(x))
        else:
            total = library.allreduce(torch.tensor(float(len(x))), op=library.Sum, name="joining.samples")
            loss = loss * (len(x) * rank.size / total)
        loss.backward()

    check(rank, mlp, step)


@case(real=JOIN)
def settings_that_differ_are_an_error(rank):
    model = mlp()
    optimizer = hvd.DistributedOptimizer(
        plain_sgd(model.parameters()), model.named_parameters(), policy="sfb", uneven_steps=rank.rank == 0
    )
    loss = loss_of(model(batch(rank, 0)))

    def first_step():
        loss.backward()  # ranks meet at its end
        optimizer.step()

    expect_error(rank, ValueError, ["uneven_steps="], first_step)


@case(real=JOIN, ranks=(4,))
def other_process_sets_have_no_join(rank):
    """Horovod's join is of all ranks; an optimizer over some of them is as without the option."""
    torch.manual_seed(7)
    model = mlp()
    optimizer = hvd.DistributedOptimizer(
        plain_sgd(model.parameters()),
        model.named_parameters(),
        policy="sfb",
        uneven_steps=True,
        process_set=rank.subset,
    )
    for index in range(4):
        optimizer.zero_grad()
        loss_of(model(batch(rank, index))).backward()
        optimizer.step()
    if rank.subset.included():
        assert optimizer.stats()["schemes"]["allreduce"]["collectives"] == 6
