"""Builds poseidon_hvd._C by handing what is installed here (tools/build_facts.py) to CMake.

Metadata: pyproject.toml.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from build_facts import BuildError, cmake_definitions  # noqa: E402


def find_tool(name):
    """The tool beside this interpreter (where PyPI's cmake and ninja install themselves), else on PATH, else None."""
    return shutil.which(name, path=str(pathlib.Path(sys.executable).parent)) or shutil.which(name)


class CMakeBuild(build_ext):
    """Builds in build/<python tag>, which survives pip's temporary folders, so that a second build is incremental."""

    def build_extension(self, ext):
        cmake = find_tool("cmake")
        if cmake is None:
            raise BuildError("cmake was not found. Install it, for example with `pip install cmake`.")
        build_dir = ROOT / "build" / sysconfig.get_config_var("SOABI")
        configure = [cmake, "-S", str(ROOT), "-B", str(build_dir), "-DPOSEIDON_BUILD_EXTENSION=ON"]
        configure += ["-DPOSEIDON_UNITY_BUILD=ON"]
        configure += [f"-D{name}={value}" for name, value in cmake_definitions().items()]
        ninja = find_tool("ninja")
        if ninja and not (build_dir / "Makefile").exists() and "CMAKE_GENERATOR" not in os.environ:
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build_dir), "--target", "_C", "--parallel", jobs], check=True)
        target = pathlib.Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(build_dir / target.name), str(target))

    def run(self):
        try:
            super().run()
        except BuildError as error:
            sys.exit(f"\nposeidon_hvd cannot be built: {error}\n")
        except subprocess.CalledProcessError as error:
            sys.exit(f"\nposeidon_hvd did not build: {error.cmd[0]} ended with status {error.returncode}, see above\n")


setup(ext_modules=[Extension("poseidon_hvd._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
