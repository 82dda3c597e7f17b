"""What the extension's build must know about the installed torch and Horovod, as CMake definitions.

setup.py hands these to CMake. Every reason not to build ends in a BuildError that says what to do.
"""

import pathlib
import re
import sysconfig

from horovod_headers import headers
from horovod_source import SDIST_SHA256, SourceError

MINIMUM_TORCH = (2, 1)


class BuildError(RuntimeError):
    """The extension cannot be built here."""


def _torch():
    try:
        import torch
    except ImportError as error:
        raise BuildError(
            f"torch does not import ({error}). Install torch first, then this package with "
            "`pip install --no-build-isolation .`: the extension is compiled against that torch."
        ) from error
    version = tuple(int(part) for part in re.match(r"(\d+)\.(\d+)", torch.__version__).groups())
    if version < MINIMUM_TORCH:
        raise BuildError(f"torch {torch.__version__} is too old; install torch >= 2.1.")
    return torch


def _horovod(torch_version):
    allowed = " or ".join(sorted(SDIST_SHA256))
    build_it = "Build it for this torch with `python tools/build_horovod.py`."
    try:
        import horovod
    except ImportError as error:
        raise BuildError(f"Horovod is not installed. {build_it}") from error
    if horovod.__version__ not in SDIST_SHA256:
        raise BuildError(
            f"Horovod {horovod.__version__} is installed (torch is {torch_version}), but this package is "
            f"written for the C++ interface of {allowed}. {build_it}"
        )
    try:
        import horovod.torch as hvd

        _ = hvd.mpi_ops  # missing where Horovod was built without torch
    except (ImportError, AttributeError, RuntimeError) as error:
        raise BuildError(
            f"Horovod {horovod.__version__} does not import with torch {torch_version}: {error}. "
            f"It was built for another torch or without torch. {build_it}"
        ) from error
    return horovod, hvd


def _gpu(hvd):
    """('CUDA' | 'ROCM' | '', include folder). Decides HAVE_GPU, which changes the layout of Horovod's Status."""
    from torch.utils import cpp_extension

    for kind, built, home in (
        ("CUDA", hvd.cuda_built(), cpp_extension.CUDA_HOME),
        ("ROCM", hvd.rocm_built(), cpp_extension.ROCM_HOME),
    ):
        if built and home is None:
            raise BuildError(f"Horovod was built with {kind}, but its headers were not found; set {kind}_HOME.")
        if built:
            return kind, str(pathlib.Path(home, "include"))
    return "", ""


def cmake_definitions():
    """Definitions for CMakeLists.txt, name -> text."""
    torch = _torch()
    horovod, hvd = _horovod(torch.__version__)
    gpu, gpu_include = _gpu(hvd)
    library = pathlib.Path(hvd.mpi_ops.__file__).with_name("mpi_lib_v2" + sysconfig.get_config_var("EXT_SUFFIX"))
    if not library.is_file():
        raise BuildError(f"Horovod's library {library.name} is not beside {hvd.mpi_ops.__file__}.")
    # Older torch registers its pybind11 types under these marks; types are shared only between equal marks.
    marks = {mark: getattr(torch._C, f"_PYBIND11_{mark}", None) for mark in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")}
    try:
        include = headers(horovod.__version__)
    except SourceError as error:
        raise BuildError(f"Horovod's headers could not be provided: {error}") from error
    return {
        "POSEIDON_PYTHON_INCLUDE": sysconfig.get_path("include"),
        "POSEIDON_EXTENSION_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
        "POSEIDON_TORCH_DIR": str(pathlib.Path(torch.__file__).parent),
        "POSEIDON_TORCH_VERSION": torch.__version__,
        "POSEIDON_CXX11_ABI": str(int(torch.compiled_with_cxx11_abi())),
        "POSEIDON_PYBIND11_MARKS": ";".join(f'PYBIND11_{mark}="{text}"' for mark, text in marks.items() if text),
        "POSEIDON_HOROVOD_VERSION": horovod.__version__,
        "POSEIDON_HOROVOD_INCLUDE": str(include),
        "POSEIDON_HOROVOD_LIBRARY": str(library),
        "POSEIDON_HOROVOD_GPU": gpu,
        "POSEIDON_GPU_INCLUDE": gpu_include,
    }
