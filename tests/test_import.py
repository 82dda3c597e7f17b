"""What importing says when something does not fit (acceptance of section 1: both versions named, and what to
rebuild).
"""

import subprocess
import sys

import pytest


def import_after(preparation):
    """Imports poseidon_hvd in a fresh interpreter after some preparation; returns the last line of the traceback."""
    code = f"{preparation}\nimport poseidon_hvd"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "preparation, expected",
    [
        pytest.param("import sys; sys.modules['horovod'] = None", ["ImportError", "build_horovod.py"], id="no-horovod"),
        pytest.param(
            "import horovod.torch, horovod; horovod.__version__ = '0.27.0'",
            ["ImportError", "0.28.1", "0.27.0", "pip install --no-build-isolation"],
            id="other-horovod",
        ),
        pytest.param(
            "import horovod.torch, torch; torch.__version__ = '2.0.1'",
            ["ImportError", "torch 2.0.1", "pip install --no-build-isolation"],
            id="other-torch",
        ),
        pytest.param(
            "import horovod.torch; horovod.torch._MPI_LIB_AVAILABLE = False",
            ["ImportError", "build_horovod.py"],
            id="no-library",
        ),
    ],
)
def test_misfit_is_an_import_error_that_says_what_to_do(preparation, expected):
    message = import_after(preparation)
    for part in expected:
        assert part in message


def test_needs_no_build_tools_when_it_runs():
    """Python >= 3.12 has no distutils, and setuptools is not installed with it."""
    code = (
        "import sys\n"
        "tools = ('setuptools', 'distutils', 'pkg_resources', 'wheel', 'pybind11', 'cmake', 'ninja')\n"
        "sys.modules.update(dict.fromkeys(tools))\n"
        "import poseidon_hvd, poseidon_hvd.torch, horovod.runner.launch\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_bound_to_horovods_pytorch_library():
    import os

    from horovod.torch import mpi_lib_v2

    import poseidon_hvd
    from poseidon_hvd._native import _C

    _C.check_horovod_layout()
    assert os.path.samefile(_C.horovod_library_path(), mpi_lib_v2.__file__)
    assert poseidon_hvd.__version__
