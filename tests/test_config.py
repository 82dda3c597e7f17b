"""All that the user gives is bounded: a bad value is a ValueError that names its argument or variable, at once."""

import json
import math
import os
import random
import time

import horovod.torch
import pytest
import torch

import poseidon_hvd
from poseidon_hvd.config import Config, stall_warning_seconds

NOT_UTF8 = b"\xff\xfe".decode(errors="surrogateescape")  # as os.environ shows such bytes
MANY_DIGITS = "9" * 5000
HUGE = 10**5000  # has no repr
NETWORK = {kind: {"alpha_seconds": 1e-3, "beta_seconds_per_byte": 1e-9} for kind in ("allreduce", "allgather")}
FUZZ_SECONDS = os.environ.get("POSEIDON_FUZZ_SECONDS", "0")
VARIABLES = tuple(f"POSEIDON_{number}_{kind}" for kind in ("ALLREDUCE", "ALLGATHER") for number in ("ALPHA", "BETA"))

pytestmark = pytest.mark.timeout(60)  # nothing here waits for anything


def brief(value):
    return ascii(value)[:20] if isinstance(value, (str, bytes)) else type(value).__name__


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith("POSEIDON_"):
            monkeypatch.delenv(name)


def refused(source, **arguments):
    """The message with which these arguments, and the environment, are refused."""
    with pytest.raises(ValueError) as error:
        Config.resolve(**arguments)
    message = str(error.value)
    assert message.startswith(source) and len(message) < 1000, message
    message.encode()  # can be printed
    return message


# ---- Environment

NOT_NUMBERS = (
    "",
    "x",
    "1x",
    "nan",
    "NaN",
    "-nan",
    "inf",
    "-inf",
    "Infinity",
    "-1",
    "-1e-300",
    "1e308",
    "1e309",
    "0x10",
    MANY_DIGITS,
    NOT_UTF8,
)


@pytest.mark.parametrize("value", NOT_NUMBERS + ("1e5",), ids=brief)
@pytest.mark.parametrize("variable", VARIABLES)
def test_network_variables(monkeypatch, variable, value):
    for name in VARIABLES:
        monkeypatch.setenv(name, "1e-3")
    monkeypatch.setenv(variable, value)
    assert ("from 0 to 10000." if "ALPHA" in variable else "from 0 to 10.") in refused(variable)


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=brief)
def test_memory_limit_variable(monkeypatch, value):
    monkeypatch.setenv("POSEIDON_MEMORY_LIMIT_MB", value)
    message = refused("POSEIDON_MEMORY_LIMIT_MB: ")
    assert "not UTF-8" in message if value == NOT_UTF8 else "is not a size in 10^6 bytes from 0 to 1e+12" in message


@pytest.mark.parametrize("value", ["", "fast", "TIME", " time", "time\n", NOT_UTF8, "x" * 100000], ids=brief)
@pytest.mark.parametrize("variable", ["POSEIDON_POLICY", "POSEIDON_DENSE"])
def test_names(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    refused(variable)


@pytest.mark.parametrize(
    "value",
    [
        "lazy:",
        "lazy:0",
        "lazy:0.5",
        "lazy:-1",
        "lazy:nan",
        "lazy:inf",
        "lazy:1e13",
        "lazy:1e309",
        "lazy:1x",
        "lazy:1:1",
        "priority:0",
        "priority:-0",
        "priority:" + MANY_DIGITS,
        "wfbp:1",
        "auto:1",
        ":1",
        "lazy:1\0x",
    ],
    ids=brief,
)
def test_sizes_of_messages(monkeypatch, value):
    assert any(part in refused("dense: ", dense=value) for part in ("from 1 to 1e12", "not like any", "use one of"))
    if "\0" not in value:
        monkeypatch.setenv("POSEIDON_DENSE", value)
        refused("POSEIDON_DENSE: ")


@pytest.mark.parametrize(
    "value",
    ["a", "=sfb", "a=", "a=SFB", "a=sfb,b", "a=sfb,=auto", NOT_UTF8 + "=sfb", "a=" + NOT_UTF8, "[" * 50000 + "=sfb"],
    ids=brief,
)
def test_schemes_variable(monkeypatch, value):
    monkeypatch.setenv("POSEIDON_SCHEMES", value)
    refused("POSEIDON_SCHEMES")


def test_a_pattern_without_a_match_names_its_source(monkeypatch):
    assert Config.resolve(schemes={"b*": "sfb"}).overrides(["bias"]) == ["sfb"]
    with pytest.raises(ValueError, match=r"^schemes: 'fc\*' matches no parameter"):
        Config.resolve(schemes={"fc*": "sfb"}).overrides(["bias"])
    monkeypatch.setenv("POSEIDON_SCHEMES", "fc*=sfb")
    with pytest.raises(ValueError, match=r"^POSEIDON_SCHEMES: 'fc\*' matches no parameter"):
        Config.resolve().overrides(["bias"])
    monkeypatch.setenv("POSEIDON_SCHEMES", "[z-a]=sfb")
    with pytest.raises(ValueError, match=r"^POSEIDON_SCHEMES: '\[z-a\]'"):
        Config.resolve().overrides(["bias"])


@pytest.mark.parametrize("value", ["", "debug", "true", "2", "-1", NOT_UTF8, MANY_DIGITS], ids=brief)
@pytest.mark.parametrize("variable", ["POSEIDON_LOG_LEVEL", "POSEIDON_UNEVEN_STEPS"])
def test_switches(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    refused(variable)


@pytest.mark.parametrize("value", ["", "soon", "nan", "-1", "-inf", NOT_UTF8])
def test_stall_time_is_refused(monkeypatch, value):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", value)
    with pytest.raises(ValueError, match="^HOROVOD_STALL_CHECK_TIME_SECONDS: "):
        stall_warning_seconds()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("0", 0), ("60", 60), ("0.5", 0.5), ("1e300", 1e9), ("inf", 1e9), (MANY_DIGITS, 1e9)],
    ids=brief,
)
def test_a_stall_time_of_any_size_is_taken(monkeypatch, value, seconds):
    """It is Horovod's variable, and Horovod takes them."""
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", value)
    assert stall_warning_seconds() == seconds


# ---- Arguments


class Hostile:
    """Raises whatever is asked of it."""

    def __repr__(self):
        raise RuntimeError

    __float__ = __bool__ = __repr__

    def __eq__(self, other):
        raise RuntimeError


@pytest.mark.parametrize(
    "value",
    [-1, math.nan, math.inf, -math.inf, 1e300, HUGE, -HUGE, True, "lots", [], {}, Hostile(), torch.ones(2)],
    ids=brief,
)
def test_memory_limit(value):
    refused("memory_limit: ", memory_limit=value)


@pytest.mark.parametrize("value", [5, b"time", ["time"], {}, NOT_UTF8, Hostile()], ids=brief)
@pytest.mark.parametrize("argument", ["policy", "dense"])
def test_names_that_are_no_text(argument, value):
    refused(f"{argument}: ", **{argument: value})


@pytest.mark.parametrize("value", [2, -1, "1", "False", [], math.nan, HUGE, Hostile(), torch.ones(2)], ids=brief)
def test_uneven_steps(value):
    refused("uneven_steps: ", uneven_steps=value)


@pytest.mark.parametrize(
    "value",
    [
        "a=sfb",
        ["a"],
        5,
        {5: "sfb"},
        {None: "sfb"},
        {"a": None},
        {"a": 1},
        {"a": HUGE},
        {"a": NOT_UTF8},
        {"a": "SFB"},
        {"[" * 50000: "sfb"},
        {HUGE: "sfb"},
        Hostile(),
    ],
    ids=brief,
)
def test_schemes(value):
    refused("schemes", schemes=value)


def network(kind, key, value):
    return {**NETWORK, kind: {**NETWORK[kind], key: value}}


@pytest.mark.parametrize(
    "value", [-1, math.nan, math.inf, 1e308, 1e300, 1e5, HUGE, True, None, "x", [], {}, Hostile()], ids=brief
)
@pytest.mark.parametrize("kind", ["allreduce", "allgather"])
@pytest.mark.parametrize("key", ["alpha_seconds", "beta_seconds_per_byte"])
def test_network(kind, key, value):
    assert " from 0 to " in refused(f"network: {kind}, {key}: ", network=network(kind, key, value))


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        5,
        b"x",
        {"network": None},
        {"network": []},
        {"allreduce": NETWORK["allreduce"]},
        {"allreduce": 1, "allgather": 2},
        "/no/such/file",
        "",
        "\0",
        NOT_UTF8,
        "/dev/zero",
        "/",
    ],
    ids=brief,
)
def test_no_network(value):
    assert "cannot read a network" in refused("network: ", network=value)


@pytest.mark.parametrize("kind", ["allreduce", "allgather"])
def test_a_network_that_takes_no_time_is_refused(monkeypatch, kind):
    free = {"alpha_seconds": 0, "beta_seconds_per_byte": 0.0}
    assert f"as if an {kind} took no time" in refused("network: ", network={**NETWORK, kind: free})
    for name in VARIABLES:
        monkeypatch.setenv(name, "0" if kind.upper() in name else "1e-3")
    refused(f"POSEIDON_ALPHA_{kind.upper()} and POSEIDON_BETA_{kind.upper()} are both 0")


def test_the_ends_of_ranges():
    ends = {kind: {"alpha_seconds": 1e4, "beta_seconds_per_byte": 0} for kind in NETWORK}
    assert Config.resolve(network=ends, memory_limit=0, uneven_steps=False, dense="lazy:1").network == (1e4, 0, 1e4, 0)
    ends = {kind: {"alpha_seconds": 0, "beta_seconds_per_byte": 10} for kind in NETWORK}
    assert Config.resolve(network=ends, memory_limit=1e18, uneven_steps=True, dense="priority:1e12").network == (
        0,
        10,
        0,
        10,
    )


# ---- Files


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe{}",
        b"null",
        b"[]",
        b"{",
        b'"x"',
        b"1",
        b"NaN",
        b"[" * 100000,
        b'{"network": ' * 100000,
        MANY_DIGITS.encode(),
        json.dumps(NETWORK).encode("utf-16"),
        json.dumps(NETWORK).encode() + b"x",
        json.dumps({"network": None}).encode(),
        json.dumps(network("allreduce", "alpha_seconds", 1e300)).encode(),
        json.dumps(network("allreduce", "alpha_seconds", math.nan)).encode(),
        json.dumps(network("allgather", "beta_seconds_per_byte", 7)).replace("7", MANY_DIGITS).encode(),
        json.dumps(network("allgather", "beta_seconds_per_byte", 7)).replace("7", "9" * 400).encode(),
    ],
    ids=brief,
)
def test_profile_files(monkeypatch, tmp_path, content):
    file = tmp_path / "network.json"
    file.write_bytes(content)
    refused("network: ", network=str(file))
    refused("network: ", network=file)
    monkeypatch.setenv("POSEIDON_PROFILE", str(file))
    refused("POSEIDON_PROFILE: ")


def test_a_file_that_never_ends_is_not_read(monkeypatch, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        monkeypatch.setenv("POSEIDON_PROFILE", str(path))
        assert "not a regular file" in refused("POSEIDON_PROFILE: ")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setenv("POSEIDON_PROFILE", str(tmp_path / "large"))
    assert "more than" in refused("POSEIDON_PROFILE: ")


def test_a_file_name_that_is_not_utf8(monkeypatch, tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"\xff.json")
    with open(path, "w") as file:
        json.dump(NETWORK, file)
    monkeypatch.setenv("POSEIDON_PROFILE", os.fsdecode(path))
    assert Config.resolve().network == (1e-3, 1e-9, 1e-3, 1e-9)


TOKENS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e308",
    "1e309",
    "-0.0",
    "5e-324",
    "null",
    "true",
    "[]",
    "{}",
    '""',
    "9" * 400,
    MANY_DIGITS,
    "[" * 2000,
    '"network"',
    ",",
    "\\ud800",
    "\0",
    "\u00e9",
]


def mutated(text: bytes, random_: random.Random) -> bytes:
    data = bytearray(text)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(data) + 1)
        kind = random_.randrange(5)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << random_.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            end = min(len(data), at + random_.randint(1, 12))
            data[at:end] = random_.choice(TOKENS).encode()
        elif kind == 3:
            data[at:at] = random_.choice(TOKENS).encode()
        else:
            begin = random_.randrange(len(data) + 1)
            data[at:at] = data[begin : begin + random_.randint(1, 40)]
    return bytes(data)


@pytest.mark.timeout(60 + 2 * float(FUZZ_SECONDS))
def test_fuzzed_files(tmp_path):
    """Whatever a file holds: a network within its ranges, or a ValueError that names the source.

    POSEIDON_FUZZ_SECONDS is for ``make test-fuzz``.
    """
    file = tmp_path / "network.json"
    plan = {"policy": "time", "network": {**NETWORK, "skew_seconds": 1}}
    seeds = [json.dumps(NETWORK).encode(), json.dumps(plan).encode(), b"{}"]
    random_ = random.Random(2017)
    taken = refusals = 0
    end = time.monotonic() + float(FUZZ_SECONDS)
    while taken + refusals < 300 or time.monotonic() < end:
        content = mutated(random_.choice(seeds), random_)
        file.write_bytes(content)
        try:
            found = Config.resolve(network=str(file)).network
        except ValueError as error:
            assert str(error).startswith("network: ") and len(str(error)) < 1000, content
            refusals += 1
        else:
            assert all(0 <= value <= most for value, most in zip(found, (1e4, 10) * 2)), content
            assert found[0] + found[1] > 0 and found[2] + found[3] > 0, content
            taken += 1
        if len(content) < 4000 and random_.random() < 0.02:
            seeds.append(content)
    assert taken and refusals


# ---- Parameters


@pytest.mark.parametrize("named", [False, True])
def test_a_lazy_layer_is_refused_until_it_has_a_shape(named):
    horovod.torch.init()
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LazyLinear(1))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    name, position = ("1.weight", r"\['params'\]\[2\]") if named else ("allreduce.noname.0.2", r"\['params'\]\[2\]")
    options = {"named_parameters": model.named_parameters()} if named else {}
    with pytest.raises(ValueError, match=rf"Parameter {name} .*{position}.*not initialized.*one forward pass"):
        poseidon_hvd.DistributedOptimizer(base, **options)
    with torch.no_grad():
        model(torch.ones(1, 2))
    optimizer = poseidon_hvd.DistributedOptimizer(base, named_parameters=model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="Parameter allreduce.noname.1.0 .*not initialized"):
        optimizer.add_param_group({"params": list(torch.nn.LazyLinear(1).parameters())})
