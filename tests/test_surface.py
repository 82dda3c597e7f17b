"""Everything public of horovod.torch, down to methods of classes in its submodules, is under our names and takes the
same arguments.

test_api.py compares the packages' own names and the optimizer's behaviour. Here Horovod is walked, so that nothing is
forgotten because nobody listed it.
"""

import importlib
import inspect
import pkgutil
import types

import horovod.torch
import pytest
import torch

import poseidon_hvd
import poseidon_hvd.torch
from poseidon_hvd.optimizer import _DistributedOptimizer

PACKAGES = ["poseidon_hvd", "poseidon_hvd.torch"]
THEIRS = "horovod.torch"
MODULES = [""] + [info.name[len(THEIRS) :] for info in pkgutil.walk_packages(horovod.torch.__path__, THEIRS + ".")]

# Made on the class for its own use; no script could call it with a purpose.
NOT_PUBLIC = {"find_duplicates"}


def public(owner, prefix=""):
    """(dotted name, object) of what is public in a module or class of Horovod's, and in its classes."""
    for name in dir(owner):
        member = getattr(owner, name)
        if name.startswith("_") or isinstance(member, types.ModuleType):
            continue  # modules are walked by name
        yield prefix + name, member
        if isinstance(member, type) and member.__module__.startswith("horovod."):
            yield from public(member, f"{prefix}{name}.")


def signature(member):
    try:
        return str(inspect.signature(member))
    except (TypeError, ValueError):  # a constant, or compiled
        return None


def resolve(owner, dotted):
    for name in dotted.split("."):
        owner = getattr(owner, name)
    return owner


def names_of(module):
    """Of the submodule ``optimizer``, which is ours, only what it defines: the rest it has imported for itself."""
    theirs = importlib.import_module(THEIRS + module)
    for name, member in public(theirs):
        if module != ".optimizer" or getattr(member, "__module__", None) == theirs.__name__:
            yield name, member


def test_the_walk_sees_what_users_import():
    seen = {f"{module}.{name}".strip(".") for module in MODULES for name, _ in names_of(module)}
    assert {
        "allreduce",
        "allreduce_async_",
        "grouped_allreduce",
        "sparse_allreduce_async",
        "allgather",
        "broadcast_",
        "alltoall",
        "reducescatter",
        "grouped_reducescatter",
        "join",
        "barrier",
        "poll",
        "synchronize",
        "init",
        "shutdown",
        "start_timeline",
        "mpi_built",
        "nccl_built",
        "broadcast_parameters",
        "broadcast_optimizer_state",
        "broadcast_object",
        "allgather_object",
        "ProcessSet.included",
        "add_process_set",
        "remove_process_set",
        "HorovodInternalError",
        "Compression.none.compress",
        "Compression.fp16.decompress",
        "DistributedOptimizer",
        "SyncBatchNorm.forward",
        "elastic.run",
        "elastic.TorchState",
        "elastic.TorchState.commit",
        "elastic.TorchState.register_reset_callbacks",
        "elastic.ElasticSampler.record_batch",
        "elastic.state.TorchState.sync",
        "elastic.sampler.ElasticSampler",
        "mpi_ops.is_homogeneous",
        "functions.broadcast_object",
        "optimizer.DistributedOptimizer",
        "sync_batch_norm.SyncBatchNorm",
        "compression.Compression",
    } <= seen


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module or "package")
def test_same_names_and_signatures(package, module):
    ours = importlib.import_module(package + module)
    wrong = []
    for name, member in names_of(module):
        if name == "DistributedOptimizer":  # test_api.test_signature_starts_with_horovods
            assert resolve(ours, name) is poseidon_hvd.DistributedOptimizer
            continue
        try:
            mine = resolve(ours, name)
        except AttributeError:
            wrong.append(f"{name} is missing")
            continue
        if (type(mine), signature(mine)) != (type(member), signature(member)):
            wrong.append(f"{name}{signature(mine)} instead of {signature(member)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    "statement",
    [
        "import {} as hvd; hvd.elastic.run, hvd.elastic.TorchState, hvd.elastic.ElasticSampler, "
        "hvd.elastic.state.TorchState",
        "import {} as hvd; hvd.mpi_ops.allreduce_async_, hvd.optimizer.DistributedOptimizer, "
        "hvd.compression.Compression.fp16",
        "import {}.elastic as elastic; elastic.run",
        "from {} import elastic, mpi_ops, optimizer, SyncBatchNorm, HorovodInternalError",
        "from {}.elastic import run, TorchState, ElasticSampler",
        "from {}.elastic.state import TorchState, ObjectState, get_handler_registry",
        "from {}.elastic.sampler import ElasticSampler",
        "from {}.mpi_ops import allreduce_async_, synchronize, size, rank, Average, Sum, "
        "ProcessSet, global_process_set",
        "from {}.functions import broadcast_object, broadcast_optimizer_state",
        "from {}.compression import Compression",
        "from {}.sync_batch_norm import SyncBatchNorm",
        "from {}.optimizer import DistributedOptimizer, _DistributedOptimizer",
    ],
)
def test_import_statements(package, statement):
    exec(statement.format(package), {})


@pytest.fixture(scope="module")
def wrapped():
    """(Horovod's, ours)"""
    horovod.torch.init()
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    wrappers = horovod.torch.DistributedOptimizer, poseidon_hvd.DistributedOptimizer
    return [
        wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for wrap, model in zip(wrappers, models)
    ]


def test_wrapped_optimizer_has_everything_public(wrapped):
    theirs, ours = ({name for name in dir(optimizer) if not name.startswith("_")} for optimizer in wrapped)
    assert theirs - ours == NOT_PUBLIC
    assert ours - theirs == {"plan", "register_reduction_hook", "scheme_report", "stats", "weigh"}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, member in vars(horovod.torch.optimizer._DistributedOptimizer).items()
        if inspect.isfunction(member) and not name.startswith("_")
    ],
)
def test_methods_take_horovods_arguments(wrapped, name):
    theirs, ours = (inspect.signature(getattr(optimizer, name)).parameters for optimizer in wrapped)
    variadic = {p.kind for p in ours.values()} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    for parameter in theirs.values():
        assert len(variadic) == 2 or (ours[parameter.name].kind, ours[parameter.name].default) == (
            parameter.kind,
            parameter.default,
        )
    assert len(variadic) == 2 or list(ours) == list(theirs)


def test_methods_that_horovod_adds_are_ours():
    added = {
        name
        for name, member in vars(horovod.torch.optimizer._DistributedOptimizer).items()
        if inspect.isfunction(member)
    }
    assert {
        "synchronize",
        "skip_synchronize",
        "step",
        "zero_grad",
        "load_state_dict",
        "set_backward_passes_per_step",
    } <= added
    assert {name for name in added if not name.startswith("_")} <= set(vars(_DistributedOptimizer))
