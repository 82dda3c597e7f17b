"""``_C.model``: what a planner asks without ranks. Bytes by formulas, steps by sums, plans by both."""

import pytest

from bench.cells import Cell
from poseidon_hvd._native import _C

RANKS = 8


def layer(outputs=4096, inputs=4096, rows=256, **options):
    return _C.model.Tensor("fc.weight", [outputs, inputs], kind="linear", rows=rows, **options)


def offers(tensor, ranks=RANKS, **options):
    return {offer["scheme"]: offer for offer in _C.model.offers(tensor, ranks=ranks, **options)}


def network(alpha=1e-3, byte=1e-8):
    share = (RANKS - 1) / RANKS
    return [2 * alpha, 2 * share * byte, alpha, share * byte]


def test_the_schemes_are_those_of_the_registry():
    assert _C.model.schemes() == ["allreduce", "sfb", "sparse_allgather", "row-sparse"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_bytes_of_a_layer(ranks):
    offer = offers(layer(1000, 4096, 100), ranks)
    share = (ranks - 1) / ranks
    assert offer["allreduce"]["sent_bytes"] == pytest.approx(2 * 4 * 1000 * 4096 * share)
    assert offer["sfb"]["sent_bytes"] == pytest.approx(4 * 5096 * 100 * share)
    assert offer["allreduce"]["bytes"] == 4 * 1000 * 4096
    assert offer["sfb"]["bytes"] == offer["sfb"]["memory_bytes"] == 4 * 5096 * 100


def test_what_travels_narrower_and_wider():
    half = offers(layer(), codec="fp16")
    assert half["allreduce"]["bytes"] == 2 * 4096 * 4096
    bfloat16 = offers(layer(dtype="bfloat16"))
    assert bfloat16["allreduce"]["bytes"] == 4 * 4096 * 4096  # Horovod does not add it up
    assert bfloat16["sfb"]["bytes"] == 2 * 8192 * 256


def test_bytes_of_a_table_and_of_its_sparse_gradient():
    table = offers(_C.model.Tensor("table", [1000, 64], kind="embedding", rows=100, unique_rows=60))
    assert set(table) == {"allreduce", "row-sparse"}
    assert table["row-sparse"]["bytes"] == 4 * (1 + 64 + 1) * 60
    sparse = offers(_C.model.Tensor("table", [1000, 64], kind="embedding", rows=100, unique_rows=60, sparse=True))
    assert sparse["sparse_allgather"]["bytes"] == (8 + 4 * 64) * 100
    assert sparse["allreduce"]["obstacle"] == "the gradient is sparse" and "bytes" not in sparse["allreduce"]


def test_a_cell_of_the_bench_counts_the_same():
    cell = Cell(1000, 4096, 32, 4, "200mbit")
    assert cell.wire_bytes == {
        "allreduce": pytest.approx(2 * 4 * 1000 * 4096 * 3 / 4),
        "sfb": pytest.approx(4 * 5096 * 32 * 3),
    }
    assert cell.network_seconds("sfb") == pytest.approx(8 * 4 * 5096 * 32 * 3 / 200e6)


def test_a_simulated_step_is_the_sum_of_its_parts():
    tensor = layer(ready_seconds=0.1, cost=[0.02, 0.01, 0.003, 0.05])
    simulate = lambda scheme: _C.model.simulate(  # noqa: E731
        [tensor], [scheme], ranks=RANKS, network=network(), compute_seconds=0.1
    )
    whole = 2e-3 + 2 * 7 / 8 * 1e-8 * 4 * 4096 * 4096
    assert simulate("allreduce")["step_seconds"] == pytest.approx(0.1 + whole)
    # Without its own product, before its input gradient, after packing; then rebuilt.
    gathered = 1e-3 + 7 / 8 * 1e-8 * 4 * 8192 * 256
    assert simulate("sfb")["step_seconds"] == pytest.approx(0.1 - 0.02 - 0.01 + 0.003 + gathered + 0.05)
    assert simulate("sfb")["network_busy_seconds"] == pytest.approx(gathered)


def test_the_chooser_takes_what_is_predicted_to_be_shortest():
    tensors = [
        layer(ready_seconds=0.1, order=0),
        _C.model.Tensor("conv.weight", [64, 64, 3, 3], ready_seconds=0.2, order=1),
    ]
    ask = {"ranks": RANKS, "network": network(), "compute_seconds": 0.2}
    plan = _C.model.choose(tensors, **ask)
    assert [tensor["scheme"] for tensor in plan["tensors"]] == ["sfb", "allreduce"]
    assert plan["dense"]["slices"] == [["conv.weight"]]
    predicted = {
        scheme: _C.model.simulate(tensors, [scheme, "allreduce"], **ask)["step_seconds"]
        for scheme in ("allreduce", "sfb")
    }
    assert plan["predicted"]["step_seconds"] == pytest.approx(predicted["sfb"])
    assert plan["predicted_dense"]["step_seconds"] == pytest.approx(predicted["allreduce"])
    assert predicted["sfb"] < predicted["allreduce"]
    assert _C.model.choose(tensors, wishes=["allreduce"], **ask)["tensors"][0]["reason"] == "override: allreduce"
    # Rebuilding that takes longer than the whole gradient's transfer.
    dear = [layer(ready_seconds=0.1, order=0, cost=[0, 0, 0, 5]), tensors[1]]
    assert _C.model.choose(dear, **ask)["tensors"][0]["scheme"] == "allreduce"


def test_by_bytes_no_network_is_needed():
    plan = _C.model.choose([layer(rows=4096)], ranks=RANKS, policy="bytes", dense="lazy")
    assert plan["tensors"][0]["scheme"] == "sfb" and plan["predicted"] is None
    plan = _C.model.choose([layer(rows=4097)], ranks=RANKS, policy="bytes", dense="lazy")
    assert plan["tensors"][0]["reason"] == "bytes: 4097 global rows, SFB sends fewer up to 4096"


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: _C.model.Tensor("x", [1], kind="convolution"), 'unknown kind "convolution" of x; use one of: linear'),
        (lambda: _C.model.Tensor("x", [-1]), "x has shape"),
        (lambda: _C.model.Tensor("x", [1], rows=-1), "rows of x"),
        (lambda: _C.model.Tensor("x", [1], dtype="int4"), "int4"),
        (lambda: _C.model.Tensor("x", [1], cost=[1.0]), "cost of x has 1 numbers"),
        (lambda: _C.model.offers(layer(), ranks=0), "ranks is 0"),
        (lambda: _C.model.offers(layer(), ranks=2, codec="zip"), 'unknown codec "zip"; use one of: none, fp16'),
        (lambda: _C.model.choose([layer()], ranks=2, policy="best"), "time, bytes, allreduce, sfb"),
        (lambda: _C.model.choose([layer()], ranks=2, network=[1.0]), "network has 1 numbers"),
        (lambda: _C.model.simulate([layer()], [], ranks=2, network=network()), "0 schemes for 1 tensors"),
        (
            lambda: _C.model.simulate([layer()], ["row-sparse"], ranks=2, network=network()),
            "fc.weight cannot travel by row-sparse: not an embedding table",
        ),
    ],
)
def test_what_cannot_be_asked_is_told(call, part):
    with pytest.raises(ValueError) as raised:
        call()
    assert part in str(raised.value)
