"""Horovod's collectives under our name, and the places where plain Horovod 0.28.1 fails or differs, next to what we
do there.
"""

import copy
import pickle
import warnings

import torch
from harness.compare import dense, expect_error, relative_error, schemes_of, sgd
from harness.registry import JOIN, case
from torch.nn import Conv2d, Embedding, Flatten, Linear, Sequential
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import poseidon_hvd as hvd
from cases.linear import loss_of, mlp

HOROVOD = "Horovod's own collectives, or plain Horovod beside"


def pair(rank, build=mlp, optimizer=sgd, names=lambda m: m.named_parameters(), own=None, **wrap):
    """(model, optimizer) of Horovod's and of ours, from the same parameters. ``own``: options that only ours has."""
    made = []
    for library, ours in ((rank.horovod, {}), (hvd, {"policy": "sfb", **(own or {})})):
        torch.manual_seed(7)
        model = build()
        made.append((model, library.DistributedOptimizer(optimizer(model.parameters()), names(model), **wrap, **ours)))
    return made


def backward(rank, model, step=0):
    dtype = next(model.parameters()).dtype
    loss = loss_of(model(rank.random(step, 6, 12).to(dtype)))
    loss.backward()
    return loss


def ranks_differ(rank, tensors):
    """Is there a rank whose values are not rank 0's?"""
    gathered = rank.gather(torch.cat([t.detach().reshape(-1) for t in tensors])[None])
    return bool((gathered != gathered[0]).any())


def steps(rank, model, optimizer, count=3, first=0):
    for step in range(first, first + count):
        optimizer.zero_grad()
        backward(rank, model, step)
        optimizer.step()
    rank.assert_same_everywhere(model.parameters(), "parameters")


# ---- The rest of Horovod, called as poseidon_hvd


@case(real=HOROVOD, ranks=(2,))
def collectives(rank):
    mine, size = torch.arange(4.0) + 10 * rank.rank, rank.size
    everyone = torch.stack([torch.arange(4.0) + 10 * r for r in range(size)])
    for op, expected in (
        (hvd.Average, everyone.mean(0)),
        (hvd.Sum, everyone.sum(0)),
        (hvd.Min, everyone.amin(0)),
        (hvd.Max, everyone.amax(0)),
        (hvd.Product, everyone.prod(0)),
    ):
        torch.testing.assert_close(hvd.allreduce(mine, op=op, name="reduce"), expected)
    torch.testing.assert_close(
        hvd.allreduce_(mine.clone(), op=hvd.Sum, prescale_factor=0.5, name="reduce_"), everyone.sum(0) / 2
    )
    handle = hvd.allreduce_async(mine, name="async")
    hvd.poll(handle)
    torch.testing.assert_close(hvd.synchronize(handle), everyone.mean(0))
    for i, reduced in enumerate(hvd.grouped_allreduce([mine, mine + 1], op=hvd.Sum, name="grouped")):
        torch.testing.assert_close(reduced, everyone.sum(0) + i * size)
    rows = torch.full((1 + rank.rank, 2), float(rank.rank))
    assert hvd.allgather(rows, name="gather")[:, 0].tolist() == [r for r in range(size) for _ in range(1 + r)]
    assert [len(part) for part in hvd.grouped_allgather([rows, rows[:1]], name="gathers")] == [
        size * (size + 1) // 2,
        size,
    ]
    assert hvd.broadcast(mine, root_rank=1, name="broadcast").tolist() == everyone[1].tolist()
    assert hvd.broadcast_(mine.clone(), root_rank=0, name="broadcast_").tolist() == everyone[0].tolist()
    received, splits = hvd.alltoall(mine[:size], splits=torch.ones(size, dtype=torch.int32), name="alltoall")
    assert received.tolist() == everyone[:, rank.rank].tolist() and splits.tolist() == [1] * size
    part = 4 // size
    scattered = hvd.reducescatter(mine, op=hvd.Sum, name="scatter")
    assert scattered.tolist() == everyone.sum(0)[rank.rank * part : (rank.rank + 1) * part].tolist()
    (scattered,) = hvd.grouped_reducescatter([mine], op=hvd.Average, name="scatters")
    assert scattered.tolist() == everyone.mean(0)[rank.rank * part : (rank.rank + 1) * part].tolist()
    sparse = torch.sparse_coo_tensor([[rank.rank]], torch.ones(1, 2), (size, 2))
    assert hvd.sparse_allreduce_async(sparse, name="sparse", op=hvd.Sum)().to_dense().tolist() == [[1.0, 1.0]] * size
    hvd.barrier()


@case(real=HOROVOD, ranks=(2,))
def objects_and_parameters(rank):
    assert hvd.broadcast_object({"from": rank.rank}, root_rank=1) == {"from": 1}
    assert hvd.allgather_object(["x"] * rank.rank) == [["x"] * r for r in range(rank.size)]
    torch.manual_seed(rank.rank)
    model = mlp()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    rank.assert_same_everywhere(model.parameters(), "parameters")


@case(real=JOIN, ranks=(2,))
def join_as_a_barrier(rank):
    """All ranks join after the same number of steps and train on, with factors too."""
    for model, optimizer in pair(rank):
        steps(rank, model, optimizer)
        rank.horovod.join()
        steps(rank, model, optimizer, first=3)


@case(real=JOIN, ranks=(2,))
def join_with_uneven_steps(rank):
    """Rank 1 has two batches less. Horovod's join covers allreduce only, so factors are switched off."""
    results = []
    for library, options in ((rank.horovod, {}), (hvd, {"policy": "allreduce"})):
        torch.manual_seed(7)
        model = mlp()
        optimizer = library.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options)
        for step in range(5 if rank.rank == 0 else 3):
            optimizer.zero_grad()
            backward(rank, model, step)
            optimizer.step()
        assert library.join() == 0  # the last one to come
        library.broadcast_parameters(model.state_dict(), root_rank=0)
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert relative_error(results[1], results[0].double()) < 1e-6


@case(real=HOROVOD, ranks=(2,))
def torch_state(rank):
    """What elastic training does to model, optimizer, sampler and numbers: commit, restore, synchronize."""
    for model, optimizer in pair(rank):
        sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0)
        steps(rank, model, optimizer)
        state.step = 3
        sampler.record_batch(0, 2)
        state.commit()
        committed = [p.detach().clone() for p in model.parameters()]
        steps(rank, model, optimizer, first=3)
        state.step, sampler.processed_num = 6, 8
        state.restore()
        assert state.step == 3 and sampler.processed_num == 4
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), committed))
        state.step = 3 + rank.rank
        state.sync()
        assert state.step == 3
        optimizer.zero_grad()
        steps(rank, model, optimizer, first=3)


@case(real=HOROVOD, ranks=(2,))
def adasum_is_horovods(rank):
    """op=Adasum gives Horovod's own optimizer. It needs MPI to train with."""
    theirs, ours = (
        library.DistributedOptimizer(sgd(mlp().parameters()), op=library.Adasum) for library in (rank.horovod, hvd)
    )
    assert vars(type(theirs)).keys() == vars(type(ours)).keys() and hasattr(ours, "_starting_models")


@case(real=HOROVOD, ranks=(2,))
def grad_scaler(rank):
    """scale, backward, synchronize, unscale, clip, step; in the second step one rank's loss is infinite and both
    leave it out.
    """
    for model, optimizer in pair(rank):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model(rank.random(step, 6, 12).float()))
            scaler.scale(loss * (float("inf") if step == 1 and rank.rank == 0 else 1.0)).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            rank.assert_same_everywhere(model.parameters(), f"parameters after step {step}")
        assert scaler.get_scale() == 32.0


@case(real=HOROVOD, ranks=(2,))
def copies_after_wrapping(rank):
    """Of model and optimizer.

    The class of a wrapped optimizer has no name that it could be imported by, in neither library.
    """
    for model, optimizer in pair(rank):
        steps(rank, model, optimizer)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy((model, optimizer))[0]):
            twin.zero_grad()
            backward(rank, twin)
            assert all(p.grad is not None for p in twin.parameters()) and not optimizer._handles
        expect_error(rank, pickle.PicklingError, ["SGD"], lambda: pickle.dumps(optimizer))
        steps(rank, model, optimizer, first=3)


@case(real=HOROVOD, ranks=(2,))
def forked_data_workers(rank):
    for model, optimizer in pair(rank):
        steps(rank, model, optimizer)
        for (rows,) in DataLoader(
            TensorDataset(torch.eye(12)), batch_size=6, num_workers=2, multiprocessing_context="fork"
        ):
            optimizer.zero_grad()
            loss_of(model(rows + rank.rank)).backward()
            optimizer.step()
            rank.assert_same_everywhere(model.parameters(), "parameters")


# ---- Where plain Horovod fails or differs


@case(real=HOROVOD, ranks=(2,))
def zero_grad_set_to_none(rank):
    (_, theirs), (model, ours) = pair(rank)
    expect_error(rank, TypeError, ["set_to_none"], lambda: theirs.zero_grad(set_to_none=True))
    backward(rank, model)
    ours.step()
    ours.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())


@case(real=HOROVOD, ranks=(2,))
def step_with_a_closure(rank):
    """Horovod reduces before the closure has computed anything, and steps without waiting for what it then sends."""
    for (model, optimizer), waits in zip(pair(rank), (False, True)):

        def closure():
            optimizer.zero_grad()
            return backward(rank, model)

        assert isinstance(optimizer.step(closure), torch.Tensor)
        assert (not optimizer._handles) == waits
        optimizer.synchronize()
    rank.assert_same_everywhere(model.parameters(), "parameters")  # ours; those of Horovod may differ or not


@case(real=HOROVOD, ranks=(2,))
def bfloat16(rank):
    (their_model, _), (model, ours) = pair(rank, lambda: mlp().bfloat16())
    expect_error(rank, ValueError, ["BFloat16"], lambda: backward(rank, their_model))
    steps(rank, model, ours)
    assert set(schemes_of(ours).values()) == {"sfb"}


@case(real=HOROVOD, ranks=(2,))
def gradients_that_are_not_contiguous(rank):
    def build():
        return Sequential(Conv2d(3, 4, 3), Flatten(), Linear(144, 10)).to(memory_format=torch.channels_last)

    def pictures(model):
        loss_of(model(rank.random(0, 5, 3, 8, 8).float().to(memory_format=torch.channels_last))).backward()

    (their_model, theirs), (model, ours) = pair(rank, build)
    expect_error(rank, ValueError, ["contiguous"], lambda: pictures(their_model))
    pictures(model)
    ours.step()
    rank.assert_same_everywhere(model.parameters(), "parameters")


@case(real=HOROVOD, ranks=(2,))
def parameters_unfrozen_after_wrapping(rank):
    """Horovod never reduces them."""

    def build():
        model = mlp()
        model[0].requires_grad_(False)
        return model

    for (model, optimizer), parted in zip(pair(rank, build), (True, False)):
        model[0].requires_grad_(True)
        backward(rank, model)
        optimizer.step()
        assert ranks_differ(rank, model[0].parameters()) == parted


@case(real=HOROVOD, ranks=(2,))
def parameters_added_after_wrapping(rank):
    """Horovod never reduces them."""
    for (model, optimizer), parted in zip(pair(rank), (True, False)):
        more = Linear(10, 10)
        optimizer.add_param_group({"params": list(more.parameters())})
        loss_of(more(model(rank.random(0, 6, 12).float()))).backward()
        optimizer.step()
        assert ranks_differ(rank, more.parameters()) == parted


@case(real=HOROVOD, ranks=(2,))
def sparse_gradients_in_half_precision(rank):
    def build():
        return Sequential(Embedding(10, 4, sparse=True), Linear(4, 3))

    def words(model):
        loss_of(model(rank.integers(0, 10, 5, 3))).backward()

    (their_model, theirs), (model, ours) = pair(
        rank, build, lambda p: torch.optim.SGD(p, lr=0.1), compression=hvd.Compression.fp16
    )
    words(their_model)
    expect_error(rank, AttributeError, ["is_floating_point"], theirs.step)
    words(model)
    ours.step()
    rank.assert_same_everywhere([dense(p) for p in model.parameters()], "parameters")


@case(real=HOROVOD, ranks=(2,))
def step_hooks_run_once(rank):
    """Horovod's wrapper and the step it wraps both call them."""
    for (model, optimizer), times in zip(pair(rank), (2, 1)):
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        steps(rank, model, optimizer, count=1)
        assert len(calls) == times


@case(real=HOROVOD, ranks=(2,))
def wrapping_twice(rank):
    (_, theirs), (model, ours) = pair(rank)
    expect_error(rank, TypeError, ["missing"], lambda: rank.horovod.DistributedOptimizer(theirs))
    steps(rank, model, hvd.DistributedOptimizer(ours, model.named_parameters(), policy="sfb"))


@case(real=HOROVOD, ranks=(2,))
def attributes_of_the_wrapped_optimizer(rank):
    """Horovod calls the constructor again, with the parameters alone."""

    class Mine(torch.optim.SGD):
        def __init__(self, parameters, lr, limit=10):
            super().__init__(parameters, lr=lr)
            self.limit = limit

    model = mlp()
    base = Mine(model.parameters(), 0.1, limit=3)
    expect_error(rank, TypeError, ["lr"], lambda: rank.horovod.DistributedOptimizer(base))
    assert hvd.DistributedOptimizer(base).limit == 3


@case(real=HOROVOD, ranks=(2,))
def lbfgs(rank):
    their_model = mlp()
    theirs = rank.horovod.DistributedOptimizer(
        torch.optim.LBFGS(their_model.parameters()), their_model.named_parameters()
    )

    def closure():
        theirs.zero_grad()
        return backward(rank, their_model)

    expect_error(rank, AssertionError, [], lambda: theirs.step(closure))
    expect_error(rank, TypeError, ["LBFGS"], lambda: hvd.DistributedOptimizer(torch.optim.LBFGS(mlp().parameters())))


@case(real=HOROVOD, ranks=(2,))
def gradients_changed_between_passes(rank):
    """The one thing that Horovod can and factors cannot: rows that were kept do not show what was done to their
    product.
    """
    for (model, optimizer), refuses in zip(pair(rank, backward_passes_per_step=2), (False, True)):
        for step in range(2):
            optimizer.zero_grad()
            backward(rank, model, step)
            if step == 1:  # with a plan
                for p in model.parameters():
                    p.grad.add_(0.5)
            if step == 1 and refuses:
                expect_error(rank, RuntimeError, ["schemes", "allreduce"], lambda: backward(rank, model, step))
                optimizer.load_state_dict(optimizer.state_dict())  # forgets the step
                break
            backward(rank, model, step)
            optimizer.step()
        rank.assert_same_everywhere(model.parameters(), "parameters")


# ---- Where both refuse, or both do the same surprising thing


@case(real=HOROVOD, ranks=(2,))
def backward_that_makes_a_graph(rank):
    for model, _ in pair(rank):
        loss = loss_of(model(rank.random(0, 6, 12).float()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own advice against it
            expect_error(rank, AssertionError, [], lambda: loss.backward(create_graph=True))


@case(real=HOROVOD, ranks=(2,))
def sync_batch_norm_wants_a_gpu(rank):
    for library in (rank.horovod, hvd):
        expect_error(rank, ValueError, ["GPU"], lambda: library.SyncBatchNorm(4)(torch.ones(2, 4)))


@case(real=HOROVOD, ranks=(2,))
def second_synchronize_under_op_sum(rank):
    """It sums what was summed already."""
    for model, optimizer in pair(rank, op=hvd.Sum):
        backward(rank, model)
        optimizer.synchronize()
        once = [p.grad.clone() for p in model.parameters()]
        optimizer.synchronize()
        for p, expected in zip(model.parameters(), once):
            assert relative_error(p.grad, rank.size * expected.double()) < 1e-6


@case(real=HOROVOD, ranks=(2,))
def zero_grad_before_the_step(rank):
    """Refused where step() reduces. Where backward() has, it discards the step."""
    for model, optimizer in pair(rank, own={"reduce_in": "step"}):
        backward(rank, model)
        expect_error(rank, AssertionError, ["race condition"], optimizer.zero_grad)
        optimizer.step()
        rank.assert_same_everywhere(model.parameters(), "parameters")


@case(real=HOROVOD, ranks=(2,))
def more_backward_passes_than_announced(rank):
    for model, optimizer in pair(rank):
        backward(rank, model)
        expect_error(rank, AssertionError, ["backward_passes_per_step"], lambda: backward(rank, model, 1))
        optimizer.synchronize()


@case(real=HOROVOD, ranks=(2,))
def module_checkpointed_twice_reentrant(rank):
    """Its gradient arrives twice in one backward, which counts as two backward passes.

    The other kind of checkpointing has no such limit.
    """
    for model, optimizer in pair(rank):
        x = rank.random(0, 6, 12).float().requires_grad_()
        h = checkpoint(model[0], x, use_reentrant=True) + checkpoint(model[0], 2 * x, use_reentrant=True)
        expect_error(rank, AssertionError, [], lambda: loss_of(model[2:](torch.relu(h))).backward())
        optimizer.load_state_dict(optimizer.state_dict())  # forgets the step
