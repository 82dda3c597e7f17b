"""Settings at the ends of their ranges: the plan is made, training goes on, gradients are right."""

from harness.compare import check
from harness.registry import case

from cases.dense import dense_check
from cases.linear import mlp, train
from cases.planning import rows_by_step, same_plan, wide


def network(alpha, beta):
    return {kind: {"alpha_seconds": alpha, "beta_seconds_per_byte": beta} for kind in ("allreduce", "allgather")}


@case(seconds=120)
def networks_at_their_ends(rank):
    slowest, fastest = network(1e4, 10), network(5e-324, 0)
    for given in (slowest, network(0, 10), fastest, {**slowest, "allgather": fastest["allgather"]}):
        for dense in ("auto", "priority"):
            runs = check(
                rank, wide, rows_by_step(lambda step: 4), expect={}, policy="time", network=given, dense=dense, steps=5
            )
            plan = same_plan(rank, runs.optimizer)
            assert {kind: plan["network"][kind] for kind in given} == given
            assert 0 <= plan["predicted_step_seconds"] <= 1e9, plan


@case
def a_message_for_every_byte(rank):
    """As many as bring nothing are not made."""
    for dense, most in (("priority:1", 2048 + 6), ("priority:8", 2048 + 6), ("lazy:1", 6)):
        runs = dense_check(rank, mlp, train(6, 12), dense=dense, network=network(1e-3, 1e-8))
        slices = same_plan(rank, runs.optimizer)["dense"]["slices"]
        assert 0 < len(slices) <= most, (dense, len(slices))
        assert {name for names in slices for name in names} == {name for name, _ in mlp().named_parameters()}
