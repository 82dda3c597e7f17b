"""Provides Horovod's C++ headers, which no Horovod wheel contains: taken from the pinned sdist of the same version.

``python tools/horovod_headers.py [--version 0.28.1]`` prints the folder to put on the include path.
"""

import argparse
import pathlib
import re
import sys
import tempfile

from horovod_source import DEFAULT_CACHE, HEADER_EDITS, SourceError, apply_edits, digest, fetch_sdist, unpack

# operations.h and everything it includes. nvtx3 and mpi.h come in only under HAVE_NVTX and HAVE_MPI, which this
# package leaves undefined (docs/building.md).
HEADERS = tuple(
    f"horovod/common/{name}.h" for name in ("operations", "common", "message", "group_table", "nvtx_op_range")
)
EXTERNAL = {"mpi.h"}


def check_closure(root):
    """Every quoted include of a header must be one of the headers taken."""
    for header in HEADERS:
        text = (root / header).read_text(encoding="utf-8")
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            if name not in EXTERNAL and not ((root / header).parent / name).is_file():
                raise SourceError(f"{header} includes {name}, which is not among the headers taken")


def headers(version, cache_dir=DEFAULT_CACHE):
    """Returns an include folder with the headers of that Horovod version, edited for gcc >= 13."""
    folder = cache_dir / f"horovod-{version}-headers-{digest(HEADER_EDITS + HEADERS)}"
    if not folder.is_dir():
        sdist = fetch_sdist(version, cache_dir)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="headers-") as work:
            root = pathlib.Path(work, "include")
            unpack(sdist, root, wanted=HEADERS)
            apply_edits(root, HEADER_EDITS)
            check_closure(root)
            root.rename(folder)
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", help="default: that of the installed Horovod")
    parser.add_argument("--cache-dir", type=pathlib.Path, default=DEFAULT_CACHE, help="default: %(default)s")
    args = parser.parse_args()
    if args.version is None:
        import horovod

        args.version = horovod.__version__
    print(headers(args.version, args.cache_dir.resolve()))


if __name__ == "__main__":
    try:
        main()
    except SourceError as error:
        sys.exit(f"horovod_headers: {error}")
