"""The Python face in one process: names, signature, checks and messages are Horovod's; with one rank the wrapper
does nothing.
"""

import copy
import importlib
import inspect
import json
import os
import warnings

import horovod.torch
import pytest
import torch

import poseidon_hvd
import poseidon_hvd.torch


@pytest.fixture(scope="module", autouse=True)
def initialized():
    horovod.torch.init()
    yield
    # No shutdown: other modules of this process may go on.


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


def wrap(model, optimizer=None, **options):
    return poseidon_hvd.DistributedOptimizer(optimizer or torch.optim.SGD(model.parameters(), lr=0.1), **options)


# ---- Exports


@pytest.mark.parametrize("module", [poseidon_hvd, poseidon_hvd.torch], ids=lambda m: m.__name__)
def test_everything_public_of_horovod_is_there(module):
    names = [name for name in dir(horovod.torch) if not name.startswith("_")]
    missing = [name for name in names if not hasattr(module, name)]
    assert not missing
    same = {name for name in names if getattr(module, name) is getattr(horovod.torch, name)}
    assert set(names) - same == {"DistributedOptimizer", "optimizer"}
    assert set(names) <= set(module.__all__)


@pytest.mark.parametrize("name", ["_MPI_LIB_AVAILABLE", "_check_has_gpu", "check_extension"])
def test_private_names_that_scripts_use(name):
    assert getattr(poseidon_hvd, name) is getattr(horovod.torch, name)


@pytest.mark.parametrize("package", ["poseidon_hvd", "poseidon_hvd.torch"])
@pytest.mark.parametrize(
    "name",
    [
        "compression",
        "elastic",
        "functions",
        "mpi_ops",
        "sync_batch_norm",
        "mpi_lib_v2",
        "elastic.state",
        "elastic.sampler",
    ],
)
def test_submodules_import_under_our_name(package, name):
    assert importlib.import_module(f"{package}.{name}") is importlib.import_module(f"horovod.torch.{name}")


@pytest.mark.parametrize("package", ["poseidon_hvd", "poseidon_hvd.torch"])
def test_optimizer_submodule_is_ours(package):
    module = importlib.import_module(f"{package}.optimizer")
    assert module.DistributedOptimizer is poseidon_hvd.DistributedOptimizer is poseidon_hvd.torch.DistributedOptimizer


def test_run_is_horovods():
    """Of the package horovod, not of horovod.torch; so a star import does not bring it."""
    assert poseidon_hvd.run is horovod.run and "run" not in poseidon_hvd.__all__
    assert [name for name in dir(horovod) if inspect.isroutine(getattr(horovod, name))] == ["run"]


def test_star_import():
    namespace = {}
    exec("from poseidon_hvd import *", namespace)
    assert namespace["DistributedOptimizer"] is poseidon_hvd.DistributedOptimizer
    assert namespace["allreduce_"] is horovod.torch.allreduce_


def test_signature_starts_with_horovods():
    theirs = list(inspect.signature(horovod.torch.DistributedOptimizer).parameters.values())
    ours = list(inspect.signature(poseidon_hvd.DistributedOptimizer).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert [p.kind for p in ours[: len(theirs)]] == [p.kind for p in theirs]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is None for p in ours[len(theirs) :])
    assert [p.name for p in ours[len(theirs) :]] == [
        "policy",
        "schemes",
        "network",
        "memory_limit",
        "uneven_steps",
        "dense",
        "reduce_in",
    ]


# ---- The class


def test_class_is_one_level_above_the_users(model):
    class Mine(torch.optim.Adam):
        def __init__(self, params, required, lr=0.1):
            super().__init__(params, lr=lr)
            self.required = required

    optimizer = wrap(model, Mine(model.parameters(), "kept"))
    assert (
        type(optimizer).__name__ == "Mine" and isinstance(optimizer, Mine) and isinstance(optimizer, torch.optim.Adam)
    )
    assert type(optimizer).__mro__[1] is Mine
    assert type(optimizer).__module__ == "horovod.torch.optimizer" == horovod.torch.DistributedOptimizer.__module__
    assert "horovod" in str(optimizer.__class__)
    assert optimizer.required == "kept"


def test_groups_are_the_users_and_state_is_dropped_as_in_horovod(model):
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    base.step()
    saved = copy.deepcopy(base.state_dict())
    optimizer = wrap(model, base)
    assert optimizer.param_groups[0] is base.param_groups[0]
    now = optimizer.state_dict()
    assert now.keys() == saved.keys() == {"state", "param_groups"}
    assert now["param_groups"] == saved["param_groups"]
    assert saved["state"] and not now["state"]


def test_repr_is_the_base_classes(model):
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    assert repr(wrap(model, base)) == repr(torch.optim.SGD(model.parameters(), lr=0.1))


def test_horovods_private_attributes(model):
    optimizer = wrap(model, named_parameters=model.named_parameters(), backward_passes_per_step=2)
    assert optimizer._parameter_names == {p: name for name, p in model.named_parameters()}
    assert optimizer.backward_passes_per_step == 2 and optimizer.op == horovod.torch.Average
    assert optimizer._handles == {} and set(optimizer._allreduce_delay) == set(model.parameters())
    assert optimizer._synchronized is False and optimizer._should_synchronize is True
    for name in (
        "_requires_update",
        "_groups",
        "_compression",
        "process_set",
        "sparse_as_dense",
        "gradient_predivide_factor",
    ):
        assert hasattr(optimizer, name), name


@pytest.mark.parametrize("name", ["_grad_accs", "_p_to_group", "_register_hooks"])
def test_more_private_attributes(model, name):
    assert hasattr(wrap(model), name)


# ---- Arguments: Horovod's checks


def duplicate(model):
    return [("a", p) for p in model.parameters()]


@pytest.mark.parametrize(
    ("options", "error", "fragment"),
    [
        (lambda m: {"gradient_predivide_factor": 2.0, "op": horovod.torch.Sum}, ValueError, "op != Average"),
        (lambda m: {"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step must be > 0"),
        (lambda m: {"named_parameters": list(m.parameters())}, ValueError, "sequence of tuples"),
        (lambda m: {"named_parameters": duplicate(m)}, ValueError, "Found duplicates: a"),
        (lambda m: {"named_parameters": []}, ValueError, "were not named"),
        (lambda m: {"named_parameters": list(m.named_parameters())[1:]}, ValueError, "were not named"),
        (lambda m: {"groups": 0}, ValueError, "groups should be"),
        (lambda m: {"groups": -1}, ValueError, "groups should be"),
        (lambda m: {"groups": [["0.weight"]]}, ValueError, "groups must consist of torch.Tensor"),
        (lambda m: {"groups": [[m[0].weight], [m[0].weight]]}, ValueError, "only appear once in groups"),
    ],
)
def test_refused_as_by_horovod(model, options, error, fragment):
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=fragment):
        horovod.torch.DistributedOptimizer(base, **options(model))
    with pytest.raises(error, match=fragment):
        poseidon_hvd.DistributedOptimizer(base, **options(model))


def test_unnamed_parameters_are_listed(model):
    with pytest.raises(ValueError, match=rf"(?s){id(model[0].weight)}.*\(3, 4\)"):
        wrap(model, named_parameters=[(n, p) for n, p in model.named_parameters() if n != "0.weight"])


def test_groups_of_a_wrong_type(model):
    with pytest.raises(ValueError, match="groups should be"):
        wrap(model, groups="two")


def test_num_groups_is_deprecated(model):
    with pytest.warns(DeprecationWarning, match="groups"):
        assert wrap(model, num_groups=2)._groups == 2


def test_surplus_and_shared_names(model):
    names = list(model.named_parameters()) + [("other", torch.nn.Parameter(torch.zeros(1))), ("again", model[0].weight)]
    optimizer = wrap(model, named_parameters=names)
    assert optimizer._parameter_names[model[1].bias] == "1.bias"


def test_set_backward_passes_per_step(model):
    optimizer = wrap(model)
    optimizer.set_backward_passes_per_step(3)
    assert optimizer.backward_passes_per_step == 3 and set(optimizer._allreduce_delay.values()) == {3}
    with pytest.raises(ValueError, match="must be > 0"):
        optimizer.set_backward_passes_per_step(0)


def test_lbfgs_is_refused(model):
    with pytest.raises(TypeError, match="LBFGS.*number of times"):
        wrap(model, torch.optim.LBFGS(model.parameters()))


# ---- Settings of ours


def test_unknown_policy_lists_the_known(model):
    with pytest.raises(ValueError, match="policy.*fast.*time, bytes, allreduce, sfb"):
        wrap(model, policy="fast")


def test_unknown_scheme_lists_the_known(model):
    with pytest.raises(ValueError, match=r"schemes.*'\*'.*gather.*auto, allreduce, sfb, row-sparse"):
        wrap(model, schemes={"*": "gather"})


def test_pattern_without_a_match_lists_the_names(model):
    with pytest.raises(ValueError, match="'fc\\*' matches no parameter.*0.bias, 0.weight"):
        wrap(model, named_parameters=model.named_parameters(), schemes={"fc*": "sfb"})


@pytest.mark.parametrize(
    ("variable", "value", "fragment"),
    [
        ("POSEIDON_POLICY", "fast", "POSEIDON_POLICY.*fast.*time, bytes, allreduce, sfb"),
        ("POSEIDON_POLICY", "", "POSEIDON_POLICY.*time, bytes, allreduce, sfb"),
        ("POSEIDON_SCHEMES", "0.weight", "POSEIDON_SCHEMES: '0.weight' is not of the form PATTERN=SCHEME"),
        ("POSEIDON_SCHEMES", "0.weight=gather", "POSEIDON_SCHEMES.*'0.weight'.*gather.*auto, allreduce, sfb"),
        ("POSEIDON_SCHEMES", "fc=sfb", "'fc' matches no parameter"),
    ],
)
def test_environment_is_validated(model, monkeypatch, variable, value, fragment):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=fragment):
        wrap(model, named_parameters=model.named_parameters())


def test_arguments_override_the_environment(model, monkeypatch):
    monkeypatch.setenv("POSEIDON_POLICY", "fast")
    monkeypatch.setenv("POSEIDON_SCHEMES", "nonsense")
    wrap(model, policy="sfb", schemes={})


def test_last_matching_pattern_wins():
    from poseidon_hvd.config import Config

    config = Config.resolve(policy="sfb", schemes={"*": "allreduce", "0.*": "auto", "0.bias": "sfb"})
    assert config.overrides(["0.bias", "0.weight", "1.weight"]) == ["sfb", "auto", "allreduce"]


def test_schemes_from_the_environment(monkeypatch):
    from poseidon_hvd.config import Config

    monkeypatch.setenv("POSEIDON_SCHEMES", " fc*.weight = sfb , head=allreduce,embed.weight=row-sparse")
    assert Config.resolve().schemes == {"fc*.weight": "sfb", "head": "allreduce", "embed.weight": "row-sparse"}


NETWORK = {
    kind: {"alpha_seconds": 1e-3, "beta_seconds_per_byte": beta}
    for kind, beta in (("allreduce", 2e-9), ("allgather", 1e-9))
}


def test_network_from_every_source(monkeypatch, tmp_path):
    from poseidon_hvd.config import Config

    values = (1e-3, 2e-9, 1e-3, 1e-9)
    assert Config.resolve().network is None
    assert Config.resolve(network=NETWORK).network == values
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps({"policy": "time", "network": NETWORK}))
    assert Config.resolve(network=str(saved)).network == values
    monkeypatch.setenv("POSEIDON_PROFILE", str(saved))
    assert Config.resolve().network == values
    for name, value in zip(
        ("ALPHA_ALLREDUCE", "BETA_ALLREDUCE", "ALPHA_ALLGATHER", "BETA_ALLGATHER"), ("1", "2", "3", "4")
    ):
        monkeypatch.setenv(f"POSEIDON_{name}", value)
    assert Config.resolve().network == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("variables", "fragment"),
    [
        ({"POSEIDON_ALPHA_ALLREDUCE": "1e-3"}, "POSEIDON_BETA_ALLREDUCE.*not set.*all four or none"),
        ({"POSEIDON_PROFILE": "/no/such/file"}, "POSEIDON_PROFILE: cannot read a network"),
        ({"POSEIDON_MEMORY_LIMIT_MB": "lots"}, "POSEIDON_MEMORY_LIMIT_MB: 'lots' is not a size"),
        ({"POSEIDON_LOG_LEVEL": "loud"}, "POSEIDON_LOG_LEVEL: 'loud' is none of info, warning"),
        ({"POSEIDON_UNEVEN_STEPS": "yes"}, "POSEIDON_UNEVEN_STEPS: 'yes' is none of 0, 1"),
    ],
)
def test_settings_of_policy_time_are_validated(monkeypatch, variables, fragment):
    from poseidon_hvd.config import Config

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=fragment):
        Config.resolve()


@pytest.mark.parametrize(
    "network",
    [{"allreduce": {}}, {"network": None}, {**NETWORK, "allgather": {"alpha_seconds": -1, "beta_seconds_per_byte": 0}}],
)
def test_bad_network_is_refused(network):
    from poseidon_hvd.config import Config

    with pytest.raises(ValueError, match="^network: "):
        Config.resolve(network=network)


def test_memory_limit_in_bytes_and_megabytes(monkeypatch):
    from poseidon_hvd.config import Config

    assert Config.resolve(memory_limit=5).memory_limit == 5
    monkeypatch.setenv("POSEIDON_MEMORY_LIMIT_MB", "3")
    assert Config.resolve().memory_limit == 3e6


def test_dense_from_every_source(monkeypatch):
    from poseidon_hvd.config import Config

    monkeypatch.delenv("POSEIDON_DENSE", raising=False)
    assert Config.resolve(policy="time").dense == "auto" == Config.resolve(policy="allreduce").dense
    assert Config.resolve(policy="bytes").dense == "lazy" == Config.resolve(policy="sfb").dense  # these measure nothing
    assert Config.resolve(policy="bytes", dense="merged").dense == "merged"
    monkeypatch.setenv("POSEIDON_DENSE", "lazy:65536")
    assert Config.resolve(policy="time").dense == "lazy:65536"
    assert Config.resolve(policy="time", dense="priority:1e6").dense == "priority:1e6"
    for bad in ("fast", "lazy:", "lazy:0", "lazy:x", "wfbp:5", "auto:5"):
        with pytest.raises(ValueError, match="dense: "):
            Config.resolve(policy="time", dense=bad)
        monkeypatch.setenv("POSEIDON_DENSE", bad)
        with pytest.raises(ValueError, match="POSEIDON_DENSE: "):
            Config.resolve(policy="time")


def test_uneven_steps_from_every_source(monkeypatch):
    from poseidon_hvd.config import Config

    assert Config.resolve().uneven_steps is False
    monkeypatch.setenv("POSEIDON_UNEVEN_STEPS", "1")
    assert Config.resolve().uneven_steps is True
    assert Config.resolve(uneven_steps=False).uneven_steps is False


def test_reduce_in_from_every_source(monkeypatch):
    from poseidon_hvd.config import Config

    monkeypatch.delenv("POSEIDON_REDUCE_IN", raising=False)
    assert Config.resolve().reduce_in == "backward"
    monkeypatch.setenv("POSEIDON_REDUCE_IN", "step")
    assert Config.resolve().reduce_in == "step"
    assert Config.resolve(reduce_in="backward").reduce_in == "backward"
    for bad in ("", "synchronize", "Step"):
        with pytest.raises(ValueError, match="^reduce_in: .* is none of backward, step"):
            Config.resolve(reduce_in=bad)
        monkeypatch.setenv("POSEIDON_REDUCE_IN", bad)
        with pytest.raises(ValueError, match="POSEIDON_REDUCE_IN: .* is none of backward, step"):
            Config.resolve()


@pytest.mark.parametrize("value", ["soon", "1s"])
def test_stall_time_is_validated(monkeypatch, value):
    from poseidon_hvd.config import stall_warning_seconds

    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", value)
    with pytest.raises(ValueError, match="HOROVOD_STALL_CHECK_TIME_SECONDS"):
        stall_warning_seconds()


# ---- One rank: nothing is exchanged and nothing is guarded


def test_one_rank_trains_like_the_base_optimizer(model):
    other = copy.deepcopy(model)
    base = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), policy="sfb")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            x = torch.full((3, 4), float(step))
            for m, o in ((other, base), (model, optimizer)):
                o.zero_grad()
                m(x).pow(2).sum().backward()
                m(x).sum().backward()  # more passes than configured: unguarded with one rank, as in Horovod
                o.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))


@pytest.mark.parametrize("arguments", [{}, {"set_to_none": True}, {"set_to_none": False}])
def test_zero_grad_takes_the_base_classes_arguments(model, arguments):
    optimizer = wrap(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.zero_grad(**arguments)
    grads = [p.grad for p in model.parameters()]
    if arguments.get("set_to_none", True):
        assert grads == [None] * 4
    else:
        assert all(g.count_nonzero() == 0 for g in grads)


def test_step_returns_the_closures_loss(model):
    optimizer = wrap(model)
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0


def test_synchronize_then_step(model):
    optimizer = wrap(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()


def test_skip_synchronize_ends_with_an_exception(model):
    optimizer = wrap(model)
    with pytest.raises(KeyError), optimizer.skip_synchronize():
        raise KeyError
    assert optimizer._should_synchronize


def test_wrapping_again(model):
    optimizer = wrap(model, wrap(model))
    assert type(optimizer).__mro__[1] is torch.optim.SGD


def test_copies(model):
    optimizer = wrap(model)
    assert isinstance(copy.deepcopy(optimizer), torch.optim.SGD)


def test_hooks_of_one_rank(model):
    """A script that clips must train alike on one rank."""
    optimizer = wrap(model, named_parameters=model.named_parameters())
    calls = []

    def halve(name, grad):
        calls.append(name)
        grad.mul_(0.5)

    before = optimizer.register_reduction_hook(before=halve, parameters=["0.*", "1.bias"])
    optimizer.register_reduction_hook(after=halve, parameters="1.*")
    model(torch.ones(2, 4)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.synchronize()
    assert calls == ["0.bias", "0.weight", "1.bias", "1.bias", "1.weight"]
    assert all(
        torch.equal(p.grad, g * factor) for p, g, factor in zip(model.parameters(), gradients, (0.5, 0.5, 0.5, 0.25))
    )
    before.remove()
    before.remove()
    optimizer.zero_grad()
    calls.clear()
    model[0](torch.ones(2, 4)).sum().backward()
    optimizer.synchronize()
    assert calls == []  # no gradient, no call


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({}, "before, after or both"),
        ({"before": print, "parameters": "fc*"}, r"fc\*.*0.bias, 0.weight"),
        ({"after": print, "parameters": ["0.*", "2.*"]}, r"2\.\*"),
        ({"after": print, "parameters": []}, "matches none"),
    ],
)
def test_hooks_that_match_nothing(model, arguments, fragment):
    with pytest.raises(ValueError, match=fragment):
        wrap(model, named_parameters=model.named_parameters()).register_reduction_hook(**arguments)


def test_weigh_with_one_rank(model):
    optimizer = wrap(model)
    loss = model(torch.ones(2, 4)).sum()
    assert torch.equal(optimizer.weigh(loss, 2), loss) and torch.equal(optimizer.weigh(loss, 0.5), loss)
    assert optimizer.weigh(loss, 0) == 0
    with pytest.raises(ValueError, match="not finite"):
        optimizer.weigh(loss * float("nan"), 0)
    with pytest.raises(ValueError, match="samples=-1 is not a number of 0 or more"):
        optimizer.weigh(loss, -1)


def test_reports_of_one_rank(model):
    optimizer = wrap(model)
    assert "1 rank" in optimizer.scheme_report()
    stats = optimizer.stats()
    assert stats["steps"] == 0 and set(stats["schemes"]) == {"allreduce", "sfb", "row-sparse"}
    assert stats["schemes"]["sfb"]["wire_bytes"] == 0


def test_all_public_functions_have_docstrings():
    optimizer = type(wrap(torch.nn.Linear(2, 2)))
    for function in (
        poseidon_hvd.DistributedOptimizer,
        optimizer.synchronize,
        optimizer.skip_synchronize,
        optimizer.step,
        optimizer.zero_grad,
        optimizer.scheme_report,
        optimizer.stats,
        optimizer.set_backward_passes_per_step,
        optimizer.register_reduction_hook,
        optimizer.weigh,
    ):
        assert inspect.getdoc(function), function


# ---- Imports that must fail with a reason


def test_not_initialized():
    code = (
        "import torch, poseidon_hvd as hvd\n"
        "m = torch.nn.Linear(2, 2)\n"
        "try: hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1))\n"
        "except ValueError as error: print('refused:', error)\n"
    )
    assert "refused: Horovod has not been initialized" in run_python(code)


@pytest.mark.parametrize(("attribute", "value"), [("horovod_version", "0.27.0"), ("torch_version", "2.0.0")])
def test_wrong_versions_are_named(attribute, value):
    code = (
        "import torch, horovod.torch, poseidon_hvd._native as native\n"
        f"native._C.{attribute} = {value!r}\n"
        "try: native._check()\n"
        "except ImportError as error: print('refused:', error)\n"
    )
    output = run_python(code)
    assert "refused:" in output and value in output and "Rebuild" in output


def test_horovod_missing_is_explained(tmp_path):
    (tmp_path / "horovod.py").write_text("raise ImportError('no horovod here')\n")
    code = "try:\n import poseidon_hvd\nexcept ImportError as error: print('refused:', error)\n"
    output = run_python(code, PYTHONPATH=str(tmp_path))
    assert "no horovod here" in output and "tools/build_horovod.py" in output


def run_python(code: str, **env: str) -> str:
    import subprocess
    import sys

    from harness.launch import environment

    complete = environment()
    for key, value in env.items():
        complete[key] = value + os.pathsep + complete[key]
    done = subprocess.run([sys.executable, "-c", code], env=complete, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
