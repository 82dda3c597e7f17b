"""Checks with clang's thread safety analysis that members are touched only with their mutex held.

``python tools/check_locks.py`` looks at every source whose header says POSEIDON_GUARDED_BY (csrc/core/base/mutex.h),
and fails where the analysis finds anything.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
CLANG_TIDY = Path(sysconfig.get_path("scripts")) / "clang-tidy"

# clang-tidy wants one check of its own, beside the compiler's.
CHECKS = "-*,clang-diagnostic-thread-safety*,bugprone-use-after-move"


def guarded_sources() -> list[Path]:
    headers = (path for path in sorted(CSRC.rglob("*.h")) if "POSEIDON_GUARDED_BY(" in path.read_text())
    return [path.with_suffix(".cc") for path in headers if path.with_suffix(".cc").exists()]


def compiler_options() -> list[str]:
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    options = ["-std=c++17", "-Wthread-safety", f"-I{CSRC}"]
    options.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    for folder in includes:
        options += ["-isystem", folder]
    return options


def main() -> int:
    sources = guarded_sources()
    assert sources, f"no source below {CSRC} has members with POSEIDON_GUARDED_BY"
    command = [str(CLANG_TIDY), "--quiet", f"--checks={CHECKS}", "--warnings-as-errors=*", f"--header-filter={CSRC}/.*"]
    return subprocess.run([*command, *map(str, sources), "--", *compiler_options()], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
