"""_C.pyi lists exactly what the extension has, with the same arguments."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon_hvd._native import _C
from poseidon_hvd.config import Config

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "poseidon_hvd" / "_C.pyi"


def public(members):
    return {name for name in members if not name.startswith("_")}


def test_names_are_those_of_the_extension():
    listed = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.AnnAssign):
            listed[node.target.id] = set()
        elif isinstance(node, ast.FunctionDef):
            listed[node.name] = set()
        elif isinstance(node, ast.ClassDef):
            listed[node.name] = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
    assert public(listed) == public(dir(_C))
    for name in ("Engine", "Session"):
        assert public(listed[name]) == public(vars(getattr(_C, name))), name


def test_options_are_those_that_the_session_reads():
    (session,) = (n for n in ast.parse(STUB.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "Session")
    init = next(member for member in session.body if isinstance(member, ast.FunctionDef))
    options = [argument.arg for argument in init.args.kwonlyargs]
    options += [name for name, knob in Config.knobs().items() if knob.option]
    assert options == _C.Session.option_names()


def test_stubtest(tmp_path):
    pytest.importorskip("mypy")
    allowed = tmp_path / "allowed"
    allowed.write_text("poseidon_hvd._C.Engine\nposeidon_hvd._C.Session\n")  # a metaclass of pybind11's own
    command = [sys.executable, "-m", "mypy.stubtest", "poseidon_hvd._C", "--allowlist", str(allowed)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
