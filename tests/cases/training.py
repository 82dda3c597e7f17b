"""Longer runs, policies and settings."""

import os

import torch
from harness.compare import assert_schemes, check, expect_error, reasons_of, schemes_of, sgd
from harness.registry import BOTH, case
from torch.nn import Dropout, Linear, ReLU, Sequential
from torch.nn import functional as F

import poseidon_hvd as hvd
from cases.linear import loss_of, mlp, train


def digits_like(rank, step, rows):
    """Learnable within fifty steps: each class lifts its own feature."""
    y = rank.integers(step, 10, rows)
    return rank.random(step, rows, 64).float() + 4 * F.one_hot(y, 64), y


def model_64():
    torch.manual_seed(7)
    return Sequential(Linear(64, 128), ReLU(), Dropout(0.1), Linear(128, 64), ReLU(inplace=True), Linear(64, 10))


def fifty_steps(rank, policy, make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4)):
    model = model_64()
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), policy=policy)
    torch.manual_seed(100 + rank.rank)  # dropout differs between ranks
    losses = []
    for step in range(50):
        x, y = digits_like(rank, step, 12 + (rank.rank + step) % 5)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(rank.reduce(loss.detach().double()).item())
    rank.assert_same_everywhere(model.parameters(), "parameters after 50 steps")
    rank.assert_same_everywhere(
        [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state], "momentum"
    )
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), losses
    return optimizer, losses


@case(seconds=120)
def fifty_steps_sfb(rank):
    optimizer, losses = fifty_steps(rank, "sfb")
    assert_schemes(optimizer, {"*": "sfb"})
    assert optimizer.stats()["schemes"]["sfb"]["tensors"] == 6 * 49
    dense, dense_losses = fifty_steps(rank, "allreduce")
    assert_schemes(dense, {"*": "allreduce"})
    # Same data, same dropout: rounding differs from the second step on and grows slowly.
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(dense_losses), rtol=1e-3, atol=1e-4)


@case(**BOTH, seconds=120)
def fifty_steps_by_bytes(rank):
    optimizer, _ = fifty_steps(rank, "bytes")
    assert set(schemes_of(optimizer).values()) == {"sfb", "allreduce"}, optimizer.scheme_report()


@case(seconds=120)
def fifty_steps_adam(rank):
    fifty_steps(rank, "sfb", lambda p: torch.optim.Adam(p, lr=0.003))


@case(**BOTH)
def policy_bytes_is_the_formula(rank):
    """SFB exactly where K (M + N) factor elements, gathered, are fewer than 2 M N gradient elements."""
    runs = check(
        rank,
        model_64,
        train(lambda t: (5 + rank.rank, 64)),
        expect={"0.weight": "sfb"},
        policy="bytes",
        steps=3,
        prepare=lambda m: m.eval(),
    )
    rows = sum(5 + r for r in range(rank.size))
    share = (rank.size - 1) / rank.size
    for t in runs.optimizer.plan()["tensors"]:
        if len(t["shape"]) != 2:
            continue
        m, n = t["shape"]
        dense, factors = t["costs"]["allreduce"]["bytes"], t["costs"]["sfb"]["bytes"]
        assert t["rows"] == rows, t
        assert abs(dense - 2 * m * n * 4 * share) < 1e-6, t
        assert abs(factors - rows * (m + n) * 4 * share) < 1e-6, t
        assert t["scheme"] == ("sfb" if factors <= dense else "allreduce"), t


@case
def policy_allreduce(rank):
    check(rank, mlp, train(6, 12), expect={"*": "allreduce"}, policy="allreduce")


@case
def default_policy_is_time(rank):
    runs = check(rank, lambda: Sequential(Linear(12, 64), Linear(64, 2)), train(4, 12), expect={}, policy=None)
    assert "time" in reasons_of(runs.optimizer)["0.weight"]
    assert runs.optimizer.plan()["policy"] == "time"


@case
def overrides_by_pattern(rank):
    check(
        rank,
        mlp,
        train(6, 12),
        policy="allreduce",
        schemes={"2.*": "sfb"},
        expect={"0.*": "allreduce", "2.*": "sfb", "4.*": "allreduce"},
    )
    check(
        rank,
        mlp,
        train(6, 12),
        policy="sfb",
        schemes={"0.weight": "allreduce"},
        expect={"0.*": "allreduce", "2.*": "sfb", "4.*": "sfb"},
    )
    check(
        rank,
        mlp,
        train(6, 12),
        policy="sfb",
        schemes={"*": "allreduce", "4.weight": "auto"},
        expect={"0.*": "allreduce", "4.*": "sfb"},
    )


@case
def override_that_cannot_be(rank):
    """SFB asked for by name where it is impossible: one warning that says why, and a right gradient."""
    check(
        rank,
        lambda: Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), Linear(72, 4)),
        train(3, 1, 8, 8),
        policy="bytes",
        schemes={"0.weight": "sfb", "2.weight": "sfb"},
        expect={"0.*": "allreduce", "2.*": "sfb"},
        warns=["sfb was asked for but cannot be"],
    )


@case(real="environment")
def settings_from_the_environment(rank):
    os.environ["POSEIDON_POLICY"] = "allreduce"
    os.environ["POSEIDON_SCHEMES"] = "2.*=sfb"
    try:
        check(rank, mlp, train(6, 12), policy=None, expect={"0.*": "allreduce", "2.*": "sfb", "4.*": "allreduce"})
        check(rank, mlp, train(6, 12), policy="sfb", schemes={}, expect={"*": "sfb"})  # arguments win
    finally:
        del os.environ["POSEIDON_POLICY"], os.environ["POSEIDON_SCHEMES"]


def _disagreement(rank, fragments, build=mlp, **options):
    """All ranks raise the same ValueError in step 0, up to their own number, and the process can go on."""
    torch.manual_seed(7)
    model = build()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), **{"policy": "sfb", **options}
    )
    loss = loss_of(model(rank.random(0, 6, 12).float()))

    def first_step():
        loss.backward()  # ranks meet at its end
        optimizer.synchronize()

    text = expect_error(rank, ValueError, fragments, first_step).replace(f"[rank {rank.rank}] ", "", 1)
    payload = torch.tensor(list(text.encode().ljust(4000)[:4000]), dtype=torch.uint8)[None]
    texts = rank.gather(payload)
    assert all(torch.equal(row, texts[0]) for row in texts), [bytes(row.tolist()).decode().strip() for row in texts]


@case
def ranks_with_different_policies(rank):
    _disagreement(rank, ["settings", "policy=", "rank 1"], policy="sfb" if rank.rank != 1 else "bytes")


@case
def ranks_with_different_overrides(rank):
    _disagreement(
        rank, ["settings", "schemes", "2.weight"], schemes={"2.weight": "allreduce"} if rank.rank == 1 else {}
    )


@case
def ranks_with_different_ops(rank):
    _disagreement(rank, ["settings", "op="], op=hvd.Sum if rank.rank == 1 else hvd.Average)


@case
def ranks_with_different_predivide_factors(rank):
    _disagreement(rank, ["settings", "predivide"], gradient_predivide_factor=1.0 + rank.rank)


@case
def ranks_with_different_compression(rank):
    compression = hvd.Compression.fp16 if rank.rank == 1 else hvd.Compression.none
    _disagreement(rank, ["settings", "compression"], compression=compression)


@case(**BOTH)
def ranks_with_different_shapes(rank):
    _disagreement(
        rank, ["parameter", "[33]", "rank 1"], build=lambda: Sequential(Linear(12, 32 + (rank.rank == 1)), ReLU())
    )


@case
def ranks_with_different_parameters(rank):
    _disagreement(rank, ["parameter", "rank 1"], build=lambda: Sequential(Linear(12, 32, bias=rank.rank != 1), ReLU()))


@case
def ranks_with_different_dtypes(rank):
    def build():
        m = Sequential(Linear(12, 32), Linear(32, 4))
        if rank.rank == 1:
            m[1].double()
        m.forward = lambda x: loss_of(m[0](x)) + m[1].weight.sum()
        return m

    _disagreement(rank, ["parameter", "rank 1"], build=build)


@case
def ranks_with_different_groups(rank):
    _disagreement(rank, ["settings", "groups"], groups=2 if rank.rank == 1 else 3)
