"""Policy time, and plans that follow what changes: one plan on all ranks, made at a step that all agree on."""

import contextlib
import io
import json
import os
import time

import torch
from harness.compare import check, reasons_of, schemes_of, sgd
from harness.registry import BOTH, JOIN, case
from torch.nn import Linear, ReLU, Sequential

import poseidon_hvd as hvd
from cases.linear import loss_of, mlp, train

# 1 MB/s; and a network on which nothing is worth a gather, whatever noise there is in what products were measured to
# cost.
SLOW = {kind: {"alpha_seconds": 1e-4, "beta_seconds_per_byte": 1e-6} for kind in ("allreduce", "allgather")}
FAST = {
    "allreduce": {"alpha_seconds": 1e-9, "beta_seconds_per_byte": 1e-15},
    "allgather": {"alpha_seconds": 1.0, "beta_seconds_per_byte": 1e-15},
}


def wide():
    return Sequential(Linear(64, 256), ReLU(), Linear(256, 64), Linear(64, 2))


def same_plan(rank, optimizer):
    plan = optimizer.plan()
    texts = rank.horovod.allgather_object(json.dumps(plan, sort_keys=True), name="planning.plan")
    assert all(text == texts[0] for text in texts), texts
    return plan


def noting(seen):
    """A ``zero`` that notes the scheme of the first layer before each step."""

    def zero(model, optimizer):
        seen.append(schemes_of(optimizer).get("0.weight"))
        optimizer.zero_grad()

    return zero


def rows_by_step(rows):
    """Forward and backward with ``rows(step)`` rows of 64 features."""
    return train(lambda t: (rows(t.index), 64))


@case(real="times of real ranks", seconds=120)
def one_plan_from_different_timings(rank):
    """cases.md 43: rank 1 computes ten times slower than the others."""

    def run(m, t):
        if rank.rank == 1:
            time.sleep(0.02)
        x = t.x(8, 64).requires_grad_()
        if rank.rank == 1:
            x.register_hook(lambda grad: time.sleep(0.05))
        loss_of(m(x)).backward()

    runs = check(rank, wide, run, expect={}, policy="time", steps=10)
    plan = same_plan(rank, runs.optimizer)
    assert plan["made_at_step"] in (7, 8) and plan["size"] == rank.size  # 7: four steps after a trial began
    network = plan["network"]
    assert all(
        network[kind]["alpha_seconds"] + network[kind]["beta_seconds_per_byte"] > 0
        for kind in ("allreduce", "allgather")
    )
    assert 0 <= plan["exposed_seconds"] < plan["predicted_step_seconds"] and plan["predicted_dense_step_seconds"] > 0
    assert plan["predicted_step_seconds"] > 0.07  # every rank's plan knows of the slow one


@case(**BOTH)
def slow_network_chooses_factors(rank):
    runs = check(
        rank,
        wide,
        rows_by_step(lambda step: 4),
        expect={"0.*": "sfb", "2.*": "sfb"},
        policy="time",
        network=SLOW,
        steps=6,
    )
    plan = same_plan(rank, runs.optimizer)
    by_name = {t["name"]: t for t in plan["tensors"]}
    costs = by_name["0.weight"]["costs"]
    assert costs["sfb"]["seconds"] < costs["allreduce"]["seconds"]
    assert abs(costs["allreduce"]["seconds"] - (1e-4 + 1e-6 * 4 * 64 * 256)) < 0.005
    assert by_name["0.weight"]["rows"] == 4 * rank.size and by_name["0.weight"]["shape"] == [256, 64]
    assert plan["predicted_step_seconds"] < plan["predicted_dense_step_seconds"]
    report = runs.optimizer.scheme_report()
    assert (
        "predicted step" in report
        and "allreduce ms" in report
        and "network: allreduce 0.10 ms + 1e+03 ns/byte" in report
    )


@case
def fast_network_chooses_allreduce(rank):
    runs = check(rank, wide, rows_by_step(lambda step: 64), expect={"*": "allreduce"}, policy="time", network=FAST)
    assert reasons_of(runs.optimizer)["0.weight"].startswith("time: ")


@case
def many_rows_choose_allreduce(rank):
    check(rank, wide, rows_by_step(lambda step: 400), expect={"*": "allreduce"}, policy="time", network=SLOW)


@case
def memory_limit(rank):
    runs = check(
        rank,
        wide,
        rows_by_step(lambda step: 4),
        expect={"*": "allreduce"},
        policy="time",
        network=SLOW,
        memory_limit=100,
    )
    assert "memory limit" in reasons_of(runs.optimizer)["0.weight"]


@case
def overrides_go_before_time(rank):
    check(
        rank,
        wide,
        rows_by_step(lambda step: 4),
        expect={"0.*": "allreduce", "2.*": "sfb"},
        policy="time",
        network=SLOW,
        schemes={"0.weight": "allreduce"},
    )
    check(
        rank,
        wide,
        rows_by_step(lambda step: 64),
        expect={"0.*": "sfb", "2.*": "allreduce"},
        policy="time",
        network=FAST,
        schemes={"0.weight": "sfb"},
    )


@case(**BOTH, seconds=180)
def rows_change_for_good(rank):
    """cases.md 38: SFB, allreduce, SFB for one layer in one run, each exact, names without a step number."""

    def rows(step):
        return 4 if step < 5 or step >= 12 else 200

    seen = []
    runs = check(rank, wide, rows_by_step(rows), expect={"0.*": "sfb"}, policy="bytes", steps=21, zero=noting(seen))
    assert seen[1:9] == ["sfb"] * 8, seen
    assert seen[9:19] == ["allreduce"] * 10, seen  # revisions are due at steps 3, 8 and 18
    assert seen[19:] == ["sfb"] * 2, seen
    same_plan(rank, runs.optimizer)


@case(seconds=120)
def four_steps_of_other_rows_bring_a_plan_forward(rank):
    seen = []
    check(
        rank,
        wide,
        rows_by_step(lambda step: 4 if step < 9 else 200),
        expect={"0.*": "allreduce"},
        policy="bytes",
        steps=15,
        zero=noting(seen),
    )
    assert seen[1:14] == ["sfb"] * 13 and seen[14] == "allreduce", seen


@case(seconds=120)
def a_short_last_batch_changes_nothing(rank):
    seen = []
    check(
        rank,
        wide,
        rows_by_step(lambda step: 200 if step % 4 == 2 else 4),
        expect={"0.*": "sfb"},
        policy="bytes",
        steps=9,
        zero=noting(seen),
    )
    assert set(seen[1:]) == {"sfb"}, seen


@case(seconds=120)
def rows_change_on_one_rank(rank):
    """The sum over ranks decides, and all see the same sum."""
    runs = check(
        rank,
        wide,
        rows_by_step(lambda step: 4 if step < 4 or rank.rank != 1 else 600),
        expect={"0.*": "allreduce"},
        policy="bytes",
        steps=10,
    )
    same_plan(rank, runs.optimizer)


@case(seconds=120)
def unfrozen_layer_is_planned(rank):
    """Frozen in the first step, dense from when it is unfrozen, factored from the next plan on."""

    def before(model, index):
        for p in model[2].parameters():
            p.requires_grad_(index >= 2)

    runs = check(rank, wide, rows_by_step(lambda step: 4), expect={"*": "sfb"}, policy="sfb", steps=6, before=before)
    same_plan(rank, runs.optimizer)


@case(seconds=120)
def added_group_is_planned(rank):
    torch.manual_seed(7)
    model = wide()
    names = dict(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        sgd(model[:2].parameters()),
        [(n, p) for n, p in names.items() if n.startswith("0.")],
        policy="time",
        network=SLOW,
    )
    for step in range(8):
        if step == 3:
            optimizer.add_param_group({"params": list(model[2:].parameters())})
        optimizer.zero_grad()
        loss_of(model(rank.random(step, 4, 64).float())).backward()
        optimizer.step()
        rank.assert_same_everywhere(
            model[:3].parameters() if step >= 3 else model[0].parameters(), f"parameters after step {step}"
        )
    assert schemes_of(optimizer)["0.weight"] == "sfb" and len(same_plan(rank, optimizer)["tensors"]) == 6


@case
def dropped_steps_do_not_confuse_the_plan(rank):
    """load_state_dict between steps; the plan goes on."""
    torch.manual_seed(7)
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="time", network=SLOW)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model(rank.random(step, 2, 12).float())).backward()
        optimizer.step()
        if step in (2, 7):
            optimizer.load_state_dict(optimizer.state_dict())
    assert same_plan(rank, optimizer)["made_at_step"] == 8


@case(real="environment and standard error")
def plan_is_logged_on_rank_0(rank):
    os.environ["POSEIDON_LOG_LEVEL"] = "info"
    try:
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            check(rank, wide, rows_by_step(lambda step: 4), expect={"0.*": "sfb"}, policy="time", network=SLOW)
    finally:
        del os.environ["POSEIDON_LOG_LEVEL"]
    printed = text.getvalue()
    assert ("plan made at step 0" in printed and "predicted step" in printed) == (rank.rank == 0), printed


@case(**BOTH)
def different_networks_are_an_error(rank):
    """Settings that differ between ranks are named, not guessed at."""
    model = mlp()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), policy="time", network=SLOW if rank.rank == 0 else FAST
    )
    try:
        loss_of(model(rank.random(0, 2, 12).float())).backward()
        optimizer.step()
    except ValueError as error:
        assert "network=" in str(error), error
    else:
        raise AssertionError("no ValueError")


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(400, 32)
        self.head = Linear(32, 4)

    def forward(self, ids):
        return self.head(self.table(ids))


@case
def tables_by_time(rank):
    """A table of many rows that few ids touch, on a slow network; many ids on a fast one."""

    def few(m, t):
        loss_of(m(t.ids(400, 6))).backward()

    def many(m, t):
        loss_of(m(t.ids(400, 600))).backward()

    runs = check(rank, Words, few, expect={"table.*": "row-sparse"}, policy="time", network=SLOW, steps=6)
    table = next(t for t in same_plan(rank, runs.optimizer)["tensors"] if t["name"] == "table.weight")
    assert table["costs"]["row-sparse"]["seconds"] < table["costs"]["allreduce"]["seconds"]
    assert "by touched rows" in runs.optimizer.scheme_report() and "sfb or rows ms" in runs.optimizer.scheme_report()
    check(rank, Words, many, expect={"table.*": "allreduce"}, policy="time", network=SLOW)


@case(seconds=120)
def ids_change_for_good(rank):
    """The rows of a table are those of its merged ids."""
    seen = []

    def zero(model, optimizer):
        seen.append(schemes_of(optimizer).get("table.weight"))
        optimizer.zero_grad()

    check(
        rank,
        Words,
        lambda m, t: loss_of(m(t.ids(400, 6 if t.index < 5 or t.index >= 12 else 3000))).backward(),
        expect={"table.*": "row-sparse"},
        policy="bytes",
        steps=21,
        zero=zero,
    )
    assert seen[1:9] == ["row-sparse"] * 8 and seen[9:19] == ["allreduce"] * 10 and seen[19:] == ["row-sparse"] * 2, (
        seen
    )


@case(real=JOIN, seconds=120)
def ranks_that_have_joined_put_a_plan_off(rank):
    """Uneven steps with everything dense: works as in Horovod, also where a plan would be due (steps 3 and 8)."""
    torch.manual_seed(7)
    model = Sequential(Linear(64, 8))
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="bytes")
    for step in range(12 if rank.rank == 0 else 2):
        optimizer.zero_grad()
        loss_of(model(rank.random(step, 100, 64).float())).backward()
        optimizer.step()
    assert rank.horovod.join() == 0
    assert set(schemes_of(optimizer).values()) == {"allreduce"}
    made = rank.horovod.allgather_object(optimizer.plan()["made_at_step"], name="planning.made")
    assert set(made) == {0}, made
    # Afterwards all are in step again, whatever they have counted before.
    for step in range(20, 32):
        optimizer.zero_grad()
        loss_of(model(rank.random(step, 100 if step < 22 else 1, 64).float())).backward()
        optimizer.step()
    assert set(schemes_of(optimizer).values()) == {"sfb"}
    same_plan(rank, optimizer)
