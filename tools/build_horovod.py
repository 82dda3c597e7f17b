"""Builds Horovod for the torch of the running interpreter, from the pinned sdist plus a few checked edits.

    python tools/build_horovod.py                     build (or take from the cache) and install
    python tools/build_horovod.py --no-install        only build; the last line printed is the wheel's path
    python tools/build_horovod.py --reuse-installed   keep an installed Horovod that already works with this torch

Horovod's own variables (HOROVOD_WITHOUT_MPI, HOROVOD_GPU_OPERATIONS, ...) are passed on. docs/building.md says more.
"""

import argparse
import hashlib
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile

from horovod_source import (
    DEFAULT_CACHE,
    HEADER_EDITS,
    SDIST_SHA256,
    Edit,
    SourceError,
    apply_edits,
    digest,
    fetch_sdist,
    unpack,
)

VERSION = "0.28.1"

# What Horovod imports while it is built or run: import name -> name on PyPI. It must be installed beforehand, because
# the build runs without isolation (isolation would fetch another torch).
REQUIREMENTS = {
    "cffi": "cffi",
    "cloudpickle": "cloudpickle",
    "packaging": "packaging",
    "psutil": "psutil",
    "yaml": "pyyaml",
    "setuptools": "setuptools",
    "wheel": "wheel",
}

# Prints version, torch's version at build time and now, and what is built in; fails if Horovod does not import.
PROBE = """
import json, pathlib, horovod, torch, horovod.torch as hvd
built_for = json.loads(pathlib.Path(horovod.__file__).with_name("metadata.json").read_text())["pytorch"]
print(horovod.__version__, built_for, torch.__version__,
      "gloo" if hvd.gloo_built() else "no-gloo", "mpi" if hvd.mpi_built() else "no-mpi",
      "cuda" if hvd.cuda_built() else "rocm" if hvd.rocm_built() else "cpu")
"""


def cxx_standard(torch_version):
    """C++ standard that this torch's headers ask for."""
    major, minor = (int(part) for part in re.match(r"(\d+)\.(\d+)", torch_version).groups())
    return 20 if (major, minor) >= (2, 14) else 17


def cuda_forced_but_incomplete(torch):
    """Whether Horovod would compile its CUDA code although nobody asked for it and the toolkit has no headers.

    Horovod decides by torch alone: a CUDA build of torch that finds an nvcc. Where the toolkit is complete this is
    welcome, because GPU tensors then work, staged through the host.
    """
    if not torch.version.cuda or any(name.startswith("HOROVOD_GPU") for name in os.environ):
        return False
    from torch.utils.cpp_extension import CUDA_HOME

    return CUDA_HOME is not None and not pathlib.Path(CUDA_HOME, "include", "cuda_runtime.h").is_file()


def edits_for(torch_version, without_cuda):
    standard = cxx_standard(torch_version)
    cpu_edits = (
        (
            Edit(
                "cmake/Modules/FindPytorch.cmake",
                "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
                "print(False)",
                "a CUDA-built torch and an nvcc without its headers: build for CPU tensors, as if there were no nvcc",
            ),
        )
        if without_cuda
        else ()
    )
    return (
        cpu_edits
        + HEADER_EDITS
        + (
            Edit(
                "CMakeLists.txt",
                "set(CMAKE_CXX_STANDARD 14)",
                f"set(CMAKE_CXX_STANDARD {standard})",
                "torch's headers refuse C++14",
            ),
            Edit(
                "CMakeLists.txt",
                'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")',
                'string(REPLACE "-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")',
                "the same code without debug information compiles in two thirds of the time",
            ),
            Edit(
                "horovod/torch/CMakeLists.txt",
                "set(CMAKE_CXX_STANDARD 14)",
                f"set(CMAKE_CXX_STANDARD {standard})",
                "torch's headers refuse C++14",
            ),
            Edit(
                "third_party/gloo/CMakeLists.txt",
                "-std=c++11 -fPIC",
                "-fPIC",
                "the bundled gloo follows the project's standard instead of its own C++11",
            ),
            Edit(
                "horovod/torch/CMakeLists.txt",
                "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
                "import sysconfig; print(sysconfig.get_path('include'))",
                "Python >= 3.12 has no distutils",
            ),
            Edit(
                "horovod/runner/js_run.py",
                "from distutils.spawn import find_executable\n",
                "from shutil import which as find_executable\n",
                "Python >= 3.12 has no distutils, and every horovodrun imports this file",
            ),
            Edit(
                "horovod/runner/http/http_server.py",
                "                        self.server.finished_list.clear()\n",
                "                        self.server.finished_list.pop(scope)\n",
                "a finished scope must not reset the count of the others, or their addresses outlive a shutdown "
                "and the next init connects to closed ports",
            ),
            Edit(
                "horovod/common/gloo/gloo_context.cc",
                "  device_attr.iface = gloo_iface_;\n"
                "  device_attr.ai_family = AF_UNSPEC;\n"
                "  auto dev = CreateDevice(device_attr);\n"
                "\n"
                "  global_ctx = global_context.ctx;\n",
                "  gloo_iface_ = global_context.gloo_iface_;\n"
                "  device_attr.iface = gloo_iface_;\n"
                "  device_attr.ai_family = AF_UNSPEC;\n"
                "  auto dev = CreateDevice(device_attr);\n"
                "\n"
                "  global_ctx = global_context.ctx;\n",
                "process sets, the global one included, must bind the interface the user chose, not the host name's",
            ),
        )
    )


def build_environment(jobs):
    """The caller's environment plus what every build needs."""
    env = dict(os.environ)
    if "MAKELEVEL" in env:  # called by make: its job server is not open to us
        for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
            env.pop(name, None)
    env.setdefault("MAKEFLAGS", f"-j{jobs}")
    env["CMAKE_GENERATOR"] = "Unix Makefiles"  # Horovod hands options of make to the build
    env["PATH"] = os.pathsep.join([str(pathlib.Path(sys.executable).parent), env.get("PATH", os.defpath)])
    env["HOROVOD_WITH_PYTORCH"] = env["HOROVOD_WITH_GLOO"] = "1"
    env["HOROVOD_WITHOUT_TENSORFLOW"] = env["HOROVOD_WITHOUT_MXNET"] = "1"
    for name in ("HOROVOD_WITHOUT_PYTORCH", "HOROVOD_WITHOUT_GLOO"):
        env.pop(name, None)
    env.setdefault("CMAKE_POLICY_VERSION_MINIMUM", "3.5")  # CMake >= 4 refuses the bundled gloo otherwise
    return env


def cache_key(torch_version, edits, env):
    """Everything that may change the wheel."""
    parts = [
        VERSION,
        digest(edits),
        torch_version,
        sysconfig.get_config_var("SOABI"),
        sysconfig.get_platform(),
        platform.libc_ver()[1],
        env.get("CC"),
        env.get("CXX"),
        shutil.which("mpicxx", path=env["PATH"]),
    ]
    parts += sorted(f"{name}={value}" for name, value in env.items() if name.startswith("HOROVOD_"))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def build_wheel(torch, cache_dir, jobs):
    """Returns the path of a wheel in the cache."""
    torch_version = torch.__version__
    without_cuda = cuda_forced_but_incomplete(torch)
    if without_cuda:
        print(
            "note: nvcc was found, but not the CUDA headers beside it: this Horovod will be for CPU tensors only; "
            "for GPU tensors install the whole toolkit or set CUDA_HOME to it"
        )
    edits = edits_for(torch_version, without_cuda)
    env = build_environment(jobs)
    folder = cache_dir / f"horovod-{VERSION}-torch-{torch_version}-{cache_key(torch_version, edits, env)}"
    cached = sorted(folder.glob("*.whl"))
    if cached:
        print(f"taking the cached wheel for torch {torch_version}")
        return cached[0]
    sdist = fetch_sdist(VERSION, cache_dir)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix="build-") as work:
        source, out = pathlib.Path(work, "source"), pathlib.Path(work, "out")
        unpack(sdist, source)
        apply_edits(source, edits)
        print(
            f"building Horovod {VERSION} for torch {torch_version} with C++{cxx_standard(torch_version)} "
            f"({env['MAKEFLAGS']}; a few minutes, quiet)",
            flush=True,
        )
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--use-pep517",
            "--no-cache-dir",
            "--wheel-dir",
            str(out),
            str(source),
        ]
        if subprocess.run(command, env=env).returncode != 0:
            raise SourceError("Horovod did not build (see the compiler's message above)")
        folder.mkdir(exist_ok=True)
        wheel = next(out.glob("*.whl"))
        return shutil.move(str(wheel), folder / wheel.name)


def probe():
    """(the words PROBE prints, or None if Horovod does not import; the error text)."""
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=tempfile.gettempdir())
    return (result.stdout.split() if result.returncode == 0 else None), result.stderr


def reusable():
    """Whether the installed Horovod is an allowed version, has gloo and was built for this very torch."""
    words, error = probe()
    if words is None:
        print(f"no usable Horovod is installed: {(error.strip().splitlines() or ['no message'])[-1]}")
        return False
    version, built_for, torch_version, gloo = words[:4]
    ok = version in SDIST_SHA256 and built_for == torch_version and gloo == "gloo"
    print(
        f"installed Horovod {' '.join(words[3:])}: version {version}, built for torch {built_for}, "
        f"running torch {torch_version}: {'reused' if ok else 'not reusable'}"
    )
    return ok


def check_requirements():
    missing = [package for module, package in REQUIREMENTS.items() if importlib.util.find_spec(module) is None]
    if importlib.util.find_spec("torch") is None:
        missing.insert(0, "torch")
    if missing:
        raise SourceError(
            f"{sys.executable} lacks {', '.join(missing)}; run: {sys.executable} -m pip install {' '.join(missing)}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", type=pathlib.Path, default=DEFAULT_CACHE, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="parallel compilers")
    parser.add_argument("--no-install", action="store_true", help="build the wheel and leave it in the cache")
    parser.add_argument("--reuse-installed", action="store_true", help="stop if a usable Horovod is installed")
    args = parser.parse_args()
    check_requirements()
    if args.reuse_installed and reusable():
        return
    import torch

    args.cache_dir.mkdir(parents=True, exist_ok=True)
    wheel = build_wheel(torch, args.cache_dir.resolve(), args.jobs)
    if args.no_install:
        print(wheel)
        return
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)], check=True
    )
    words, error = probe()
    if words is None or words[3] != "gloo":
        raise SourceError(f"the new Horovod does not work:\n{error}")
    print(f"installed Horovod {words[0]} for torch {words[1]} ({' '.join(words[3:])})")


if __name__ == "__main__":
    try:
        main()
    except SourceError as error:
        sys.exit(f"build_horovod: {error}")
