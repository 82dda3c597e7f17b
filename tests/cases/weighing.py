"""weigh(): the averaged gradient is the mean over all samples of all ranks."""

import copy

import torch
from harness.compare import expect_error, relative_error, schemes_of
from harness.registry import BOTH, case
from torch.nn import functional as F

import poseidon_hvd as hvd
from cases.linear import mlp
from cases.reduction_hooks import made


def samples_of(rank, index):
    """Rank 1 has none in step 1."""
    return 0 if (rank, index) == (1, 1) else 2 + 3 * ((rank + index) % 3)


def everybodys(rank, tensor):
    """The rows of all ranks together."""
    return rank.horovod.allgather(tensor, name="weighing.rows")


def mean_loss(model, x):
    if len(x) == 0:
        return model(x).sum()
    return F.mse_loss(model(x), torch.ones(len(x), 10, dtype=x.dtype))


@case(**BOTH)
def unequal_batches_give_the_gradient_of_all_samples(rank):
    for policy in ("sfb", "allreduce"):
        model, optimizer = made(rank, build=lambda: mlp().double(), policy=policy)
        for index in range(4):
            reference = copy.deepcopy(model)
            reference.zero_grad()
            x = rank.random(index, samples_of(rank.rank, index), 12)
            mean_loss(reference, everybodys(rank, x)).backward()
            optimizer.zero_grad()
            loss = mean_loss(model, x)
            weighed = optimizer.weigh(loss, len(x))
            assert torch.isfinite(weighed) and weighed.dtype == torch.float64
            weighed.backward()
            optimizer.synchronize()
            for (name, p), q in zip(model.named_parameters(), reference.parameters()):
                assert relative_error(p.grad, q.grad) < 1e-13, (policy, index, name)
            with optimizer.skip_synchronize():
                optimizer.step()
        assert set(schemes_of(optimizer).values()) == {policy}


@case
def each_pass_is_weighed_alone(rank):
    """The gradient of a step is the sum of those of its passes, as without weighing."""
    model, optimizer = made(rank, build=lambda: mlp().double(), backward_passes_per_step=2)
    for index in range(3):
        reference = copy.deepcopy(model)
        reference.zero_grad()
        optimizer.zero_grad()
        for salt in range(2):
            x = rank.random(index, samples_of(rank.rank, index + salt), 12, salt=salt)
            mean_loss(reference, everybodys(rank, x)).backward()
            optimizer.weigh(mean_loss(model, x), len(x)).backward()
        optimizer.synchronize()
        for (name, p), q in zip(model.named_parameters(), reference.parameters()):
            assert relative_error(p.grad, q.grad) < 1e-13, (index, name)
        with optimizer.skip_synchronize():
            optimizer.step()


@case
def nobody_has_samples(rank):
    model, optimizer = made(rank)
    loss = mean_loss(model, torch.zeros(0, 12))
    optimizer.weigh(loss, 0).backward()
    optimizer.step()
    assert all(p.grad.count_nonzero() == 0 for p in model.parameters())


@case
def weigh_refuses(rank):
    model, optimizer = made(rank)
    loss = mean_loss(model, rank.random(0, 4, 12).float())
    for samples in (-1, float("nan"), float("inf"), "many", None):
        expect_error(rank, ValueError, ["samples=", "0 or more"], lambda: optimizer.weigh(loss, samples))
    expect_error(rank, ValueError, ["not finite"], lambda: optimizer.weigh(loss * float("nan"), 0))
    _, summing = made(rank, op=hvd.Sum)
    expect_error(rank, ValueError, ["op=hvd.Average"], lambda: summing.weigh(loss, 4))
