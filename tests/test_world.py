"""Ranks as threads: what goes wrong is found, named and over soon, and ranks keep apart what processes would."""

import contextlib
import os
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from cases.linear import mlp
from cases.linear import train as train_mlp
from harness import native
from harness.compare import Run3
from harness.registry import MODULES, cases_of, selection
from harness.seeding import seeded
from harness.world import RanksFailed, World

import poseidon_hvd as hvd
from poseidon_hvd import _runtime

OURS = ("rank-", "poseidon-engine", "local-transport")


def threads_of_ours():
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended since
            names.append((task / "comm").read_text().strip())
    names += [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(OURS)]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not threads_of_ours()


def wrapped(**options):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.Tanh(), torch.nn.Linear(32, 5))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(base, model.named_parameters(), **{"policy": "sfb", **options})


def train(rank, model, optimizer, steps=1, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(rank.random(step, 8, 12).float()).tanh().sum().backward()
        optimizer.step()


def three_steps(rank):
    model, optimizer = wrapped()
    train(rank, model, optimizer, 3)
    rank.assert_same_everywhere(model.parameters(), "parameters")
    return [p.detach().clone() for p in model.parameters()]


def failure(main, size=3, seconds=30.0, within=10.0):
    """How the run failed, which took less than ``within`` seconds."""
    begin = time.monotonic()
    with World(size) as world, pytest.raises(RanksFailed) as raised:
        world.run(main, seconds=seconds)
    assert time.monotonic() - begin < within
    return raised.value


# ---- Runs that succeed


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_results_come_in_the_order_of_ranks(size):
    with World(size) as world:
        assert world.run(lambda rank: (rank.rank, rank.size)) == [(r, size) for r in range(size)]
        assert world.run(lambda rank: rank.gather(torch.tensor([rank.rank])).tolist()) == [list(range(size))] * size


def test_one_world_for_several_runs():
    with World(2) as world:
        first, second = world.run(three_steps), world.run(three_steps)
        names = {each["name"] for each in world.executed()}
    assert all(torch.equal(p, q) for p, q in zip(first[0], second[0]))
    for run in (1, 2):
        assert any(name.startswith(f"poseidon.{run}.0.sfb.") for name in names)


def test_delays_change_when_and_not_what():
    with World(3) as world:
        expected = world.run(three_steps)[0]
    for seed in range(3):
        with World(3, max_delay=0.003, seed=seed) as world:
            begin = time.monotonic()
            got = world.run(three_steps)[0]
            assert time.monotonic() - begin > 0.003 * len(world.executed()) / 10
        assert all(torch.equal(p, q) for p, q in zip(got, expected))


def test_log_of_operations():
    with World(2) as world:
        world.run(three_steps)
        log = world.executed()
    factors = [each for each in log if ".sfb." in each["name"]]
    assert {each["kind"] for each in factors} == {"allgather"} and len(factors) == 2 * 2  # two layers, two steps
    assert all(each["ok"] and each["process_set"] == 0 and each["dtype"] == "float32" for each in factors)
    assert factors[0]["bytes"] == [8 * (32 + 5 + 1) * 4] * 2  # rows of [x | d | flag]


def test_no_threads_are_left_when_sessions_outlive_the_world():
    kept = []
    with World(2) as world:
        world.run(lambda rank: kept.append(wrapped()))
    assert not threads_of_ours()
    assert len(kept) == 2


def test_optimizers_of_other_threads_belong_to_the_process():
    with World(2) as world:
        worlds = world.run(lambda rank: _runtime.current_world())
    assert worlds[0] is not worlds[1] and _runtime.current_world() not in worlds
    assert type(_runtime.current_world()) is _runtime.World


def test_every_case_runs_somewhere():
    everything = {f"{module}.{name}" for module in MODULES for name in cases_of(module)}
    assert everything == {key for kind in ("threads", "ranks") for _, key in selection(kind)}


# ---- Runs that fail


def test_a_rank_that_raises():
    def main(rank):
        model, optimizer = wrapped()
        train(rank, model, optimizer)
        if rank.rank == 1:
            raise KeyError("lost")
        train(rank, model, optimizer, first=1)

    error = failure(main)
    assert error.kinds == {0: "stopped", 1: "KeyError", 2: "stopped"}
    assert "rank 1 raised KeyError" in str(error) and "not sent by ranks [1" in str(error)
    assert all(f"---- rank {rank}" in str(error) for rank in range(3))


def test_all_ranks_raise():
    def main(rank):
        raise ValueError(f"of rank {rank.rank}")

    error = failure(main)
    assert set(error.kinds.values()) == {"ValueError"}
    assert all(f"of rank {rank}" in error.errors[rank] for rank in range(3))


def test_a_rank_that_raises_while_others_meet():
    def main(rank):
        if rank.rank == 2:
            raise SystemExit(3)
        rank.everywhere(True)

    assert failure(main, within=5).kinds == {0: "stopped", 1: "stopped", 2: "SystemExit"}


@pytest.mark.parametrize("where", ["collective", "meeting"])
def test_a_rank_that_never_comes(where):
    def main(rank):
        model, optimizer = wrapped()
        while rank.rank == 1:
            time.sleep(0.01)
        train(rank, model, optimizer) if where == "collective" else rank.everywhere(True)

    error = failure(main, seconds=0.5)
    assert set(error.kinds.values()) == {"stuck"} and "not done after 0.5 s" in str(error)
    assert "time.sleep(0.01)" in error.errors[1] and "---- rank 0" in str(error) and "---- rank 2" in str(error)
    assert ("not sent by ranks [1]" in str(error)) == (where == "collective")


@pytest.mark.parametrize("where", ["collective", "meeting"])
def test_a_rank_that_ends_early(where):
    def main(rank):
        model, optimizer = wrapped()
        if rank.rank != 1:
            train(rank, model, optimizer) if where == "collective" else rank.everywhere(True)

    error = failure(main)
    assert "rank 1 came to its end" in str(error) and 1 not in error.kinds
    expected = {"collective": "ranks [1] ended and the others wait", "meeting": "wait for ranks [1], which have ended"}
    assert expected[where] in str(error)


def test_results_that_differ():
    def main(rank):
        model, optimizer = wrapped()
        train(rank, model, optimizer)
        if rank.rank == 2:
            with torch.no_grad():
                model[0].weight[0, 0] = torch.nextafter(model[0].weight[0, 0], torch.tensor(9.0))
        rank.assert_same_everywhere(model.parameters(), "parameters")

    error = failure(main)
    assert set(error.kinds.values()) == {"AssertionError"} and "parameters: ranks [2] differ from rank 0" in str(error)


@pytest.mark.parametrize("wrong, found", [(1 + 1e-5, True), (1 + 1e-7, False)])
def test_gradients_that_are_wrong(wrong, found):
    def main(rank):
        def change(name, grad):
            grad.mul_(wrong)

        runs = Run3(rank, mlp, train_mlp(6, 12))
        runs.optimizer.register_reduction_hook(after=change, parameters="2.weight")
        for step in range(3):
            runs.step(step)

    if found:
        error = failure(main)
        assert set(error.kinds.values()) == {"AssertionError"} and "2.weight: relative error 1.0" in str(error)
    else:
        with World(3) as world:
            world.run(main)


def test_a_world_that_failed_is_not_used_again():
    def main(rank):
        raise ValueError("no")

    with World(2) as world:
        with pytest.raises(RanksFailed):
            world.run(main)
        with pytest.raises(AssertionError, match="cannot be used any more"):
            world.run(three_steps)


# ---- Failures that are asked for


@pytest.mark.parametrize("which", [None, 1])
def test_fail_next(which):
    def main(rank):
        model, optimizer = wrapped()
        train(rank, model, optimizer)
        rank.horovod.exchange()
        if rank.rank == 0:
            world.fail_next("poseidon.1.0.sfb.0.weight", message="cable cut", rank=which)
        rank.horovod.exchange()
        try:
            train(rank, model, optimizer, first=1)
        except hvd.HorovodInternalError as error:
            return str(error)
        return None

    with World(3) as world:
        texts = world.run(main)
        failed = [each for each in world.executed() if not each["ok"]]
    assert [each["name"] for each in failed] == ["poseidon.1.0.sfb.0.weight"]
    for rank, text in enumerate(texts):
        if which in (None, rank):
            assert "cable cut" in text and f"[rank {rank}]" in text and "0.weight" in text
        else:
            assert text is None


# ---- What ranks do not share


def test_warnings_are_each_ranks_own():
    def main(rank):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for i in range(20):
                warnings.warn(f"{rank.rank}.{i}", stacklevel=1)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore" if rank.rank else "default")
                    warnings.warn("inner", DeprecationWarning, stacklevel=1)
                time.sleep(0)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "bad")
            warnings.warn("good", stacklevel=2) if rank.rank else pytest.raises(UserWarning, warnings.warn, "bad one")
        return [str(w.message) for w in caught]

    with pytest.warns(UserWarning, match="good") as outside, World(3) as world:
        texts = world.run(main)
    for rank, own in enumerate(texts):
        assert [text for text in own if text != "inner"] == [f"{rank}.{i}" for i in range(20)]
        assert own.count("inner") == (0 if rank else 20)
    assert [str(w.message) for w in outside] == ["good"] * 2


def test_random_numbers_are_those_of_a_process():
    def draws(rank=None):
        torch.manual_seed(3)
        layer = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Dropout(0.5), torch.nn.LSTM(40, 3)).double()
        with seeded(5):
            inner = torch.rand(3)
        x = torch.nn.functional.dropout(layer[1](layer[0](torch.ones(2, 40, dtype=torch.float64))), 0.3)
        return [
            *layer.parameters(),
            inner,
            x,
            torch.randn(3),
            torch.randint(9, (5,)),
            torch.randperm(6),
            torch.randn_like(x),
            torch.bernoulli(torch.full((9,), 0.5)),
            torch.empty(4).normal_(),
            torch.get_rng_state(),
        ]

    with torch.random.fork_rng():
        expected = draws()
    before = torch.get_rng_state()
    with World(4) as world:
        for drawn in world.run(draws):
            assert len(drawn) == len(expected) and all(torch.equal(a, b) for a, b in zip(drawn, expected))
    assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_that_all_ranks_would_share_are_refused():
    with torch.random.fork_rng(), World(2) as world, pytest.raises(AssertionError, match="default generator"):
        world.run(lambda rank: torch.poisson(torch.ones(3)))


@pytest.mark.parametrize(
    "change, what",
    [
        (lambda: os.environ.update(POSEIDON_TEST_WORLD="1"), "environment"),
        (lambda: torch.set_default_dtype(torch.float64), "default dtype"),
        (lambda: torch.autograd.set_detect_anomaly(True), "anomaly mode"),
    ],
)
def test_changes_of_the_process_are_refused(change, what, monkeypatch):
    monkeypatch.delenv("POSEIDON_TEST_WORLD", raising=False)
    try:
        with World(2) as world, pytest.raises(AssertionError, match=what):
            world.run(lambda rank: change() if rank.rank else None)
    finally:
        os.environ.pop("POSEIDON_TEST_WORLD", None)
        torch.set_default_dtype(torch.float32)
        torch.autograd.set_detect_anomaly(False)


# ---- The transport, seen from Python


REDUCTIONS = {hvd.Sum: torch.sum, hvd.Min: torch.amin, hvd.Max: torch.amax, hvd.Product: torch.prod}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_reductions_of_integers_are_those_of_torch(dtype):
    def main(rank):
        values = rank.integers(0, 5, 1000).to(dtype)
        everyones = torch.stack(rank.horovod.exchange(values))
        for op, reduction in REDUCTIONS.items():
            got = rank.horovod.allreduce(values, name="t", op=op)
            assert got.dtype == dtype and torch.equal(got, reduction(everyones.long(), dim=0).to(dtype))
        scaled = rank.horovod.allreduce(values, name="t", op=hvd.Sum, postscale_factor=4.0)
        assert torch.equal(scaled, (4 * everyones.long().sum(0)).to(dtype))

    with World(3) as world:
        world.run(main)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_reductions_of_floats_are_those_of_torch(dtype):
    def main(rank):
        values = rank.random(0, 1000).to(dtype)
        everyones = torch.stack(rank.horovod.exchange(values))
        for op, reduction in REDUCTIONS.items():
            got = rank.horovod.allreduce(values, name="t", op=op, prescale_factor=0.5)
            expected = reduction(0.5 * everyones.double(), dim=0)
            scale = (0.5 * everyones.double()).abs().sum(0) + expected.abs()
            assert got.dtype == dtype and ((got - expected).abs() <= 2 * torch.finfo(dtype).eps * scale).all()
            rank.assert_same_everywhere([got], str(op))

    with World(3) as world:
        world.run(main)


def test_half_precision_is_torchs():
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = values[torch.isfinite(values)]

    def main(rank):
        scaled = rank.horovod.allreduce(values, name="t", op=hvd.Sum, postscale_factor=1 / 3)
        assert torch.equal(scaled.view(torch.int16), (values.float() * torch.tensor(1 / 3)).half().view(torch.int16))

    with World(1) as world:
        world.run(main)


def test_bfloat16_is_gathered_and_not_reduced():
    def main(rank):
        mine = torch.full((2, 3), 1.5 + rank.rank, dtype=torch.bfloat16)
        gathered = rank.horovod.allgather(mine, name="gather")
        assert gathered.dtype == torch.bfloat16 and gathered[::2, 0].tolist() == [1.5, 2.5]
        with pytest.raises(ValueError, match="reduce: Horovod cannot send bfloat16"):
            rank.horovod.allreduce(mine, name="reduce")

    with World(2) as world:
        world.run(main)


def test_process_sets():
    def main(rank):
        members = rank.horovod.ProcessSet([0, 2])
        if rank.rank == 1:
            assert not members.included() and members.rank() == -1
            return None
        assert members.size() == 2 and members.rank() == rank.rank // 2
        mean = rank.horovod.allreduce(torch.tensor([float(rank.rank)]), name="t", process_set=members)
        return mean.item(), rank.horovod.exchange(rank.rank, members)

    with World(3) as world:
        assert world.run(main) == [(1.0, [0, 2]), None, (1.0, [0, 2])]


# ---- Finding the extension


def test_an_extension_of_another_build_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("POSEIDON_BUILD_FOLDER", str(tmp_path))
    with pytest.raises(native.NotBuilt, match="make build"):
        native.build()
    (tmp_path / Path(native._C.__file__).name).write_bytes(b"of another build")
    with pytest.raises(native.NotBuilt, match=str(tmp_path)):
        native.build()
