"""Horovod's source distribution: pinned, fetched through pip, unpacked and edited with checks.

Shared by build_horovod.py (the whole build) and horovod_headers.py (headers only). Standard library and pip only.
"""

import dataclasses
import hashlib
import pathlib
import subprocess
import sys
import tarfile
import tempfile

REPO = pathlib.Path(__file__).resolve().parent.parent
DEFAULT_CACHE = REPO / ".cache"

# Versions whose C++ interface is the one this package compiles against, with the sha256 of their sdist on PyPI.
SDIST_SHA256 = {
    "0.28.0": "32bba0bdc9fc1bf0b2ba63950fbefce8d8be095a3a87d3977a3dc3f1eb12ffab",
    "0.28.1": "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0",
}


class SourceError(RuntimeError):
    """The sdist could not be fetched, or is not the text an edit was written for."""


@dataclasses.dataclass(frozen=True)
class Edit:
    """Replaces `expected`, which must stand in `file` exactly `count` times."""

    file: str
    expected: str
    replacement: str
    reason: str
    count: int = 1


# Wanted by whoever compiles these headers, Horovod itself or this package.
HEADER_EDITS = (
    Edit(
        "horovod/common/common.h",
        "#include <memory>\n#include <string>\n",
        "#include <memory>\n#include <stdexcept>\n#include <string>\n",
        "throws std::logic_error; gcc >= 13 no longer includes <stdexcept> by accident",
    ),
    Edit(
        "horovod/common/group_table.h",
        "#include <queue>\n#include <unordered_map>\n",
        "#include <queue>\n#include <string>\n#include <unordered_map>\n",
        "names std::string; gcc >= 13 no longer includes <string> by accident",
    ),
)


def digest(edits):
    """Short hash that changes with any edit."""
    return hashlib.sha256(repr(tuple(edits)).encode()).hexdigest()[:12]


def fetch_sdist(version, cache_dir):
    """Returns the path of the sdist in `cache_dir`; pip downloads it and checks its hash when it is not there yet."""
    try:
        sha256 = SDIST_SHA256[version]
    except KeyError:
        raise SourceError(f"Horovod {version} is not supported; allowed: {', '.join(sorted(SDIST_SHA256))}") from None
    cache_dir.mkdir(parents=True, exist_ok=True)
    sdist = cache_dir / f"horovod-{version}.tar.gz"
    if sdist.exists() and hashlib.sha256(sdist.read_bytes()).hexdigest() == sha256:
        return sdist
    with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
        pins = pathlib.Path(folder, "pins.txt")
        pins.write_text(f"horovod=={version} --hash=sha256:{sha256}\n")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary=:all:",
            "--no-build-isolation",
            "--require-hashes",
            "--dest",
            folder,
            "--requirement",
            str(pins),
        ]
        if subprocess.run(command).returncode != 0:
            raise SourceError(f"pip could not download the sdist of Horovod {version} (see its message above)")
        pathlib.Path(folder, sdist.name).replace(sdist)
    return sdist


def unpack(sdist, destination, wanted=None):
    """Unpacks regular files of the sdist below its top folder; only those in `wanted` if given."""
    with tarfile.open(sdist) as archive:
        for member in archive:
            name = pathlib.PurePosixPath(member.name)
            relative = pathlib.PurePosixPath(*name.parts[1:])
            if not member.isfile() or (wanted is not None and str(relative) not in wanted):
                continue
            if name.is_absolute() or ".." in name.parts:
                raise SourceError(f"{sdist.name} holds a path outside its folder: {member.name}")
            target = destination / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.extractfile(member).read())
            target.chmod(member.mode & 0o777 | 0o600)
    if wanted is not None:
        missing = [file for file in wanted if not (destination / file).is_file()]
        if missing:
            raise SourceError(f"{sdist.name} lacks {', '.join(missing)}")


def apply_edits(root, edits):
    """Applies every edit or raises, naming the file and the text it should have held."""
    for edit in edits:
        path = root / edit.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        found = text.count(edit.expected)
        if found != edit.count:
            raise SourceError(
                f"{edit.file}: expected {edit.count} time(s), found {found} time(s):\n"
                f"{edit.expected}\nwanted because: {edit.reason}"
            )
        path.write_text(text.replace(edit.expected, edit.replacement), encoding="utf-8")
