"""Loads Horovod and the C++ extension, and refuses combinations that would corrupt memory.

The order matters: the extension is linked against Horovod's library by its bare file name, which the loader resolves to
the copy that ``horovod.torch`` has already loaded.
"""

import os

import torch

__all__ = ["_C", "horovod", "horovod_torch"]

_REBUILD = (
    "Rebuild it against what is installed: "
    "pip install --no-build-isolation --no-deps --force-reinstall <source folder>."
)

try:
    import horovod
    import horovod.torch as horovod_torch
except ImportError as error:
    raise ImportError(
        "poseidon_hvd extends Horovod, and horovod.torch cannot be imported "
        f"({error}). Build Horovod 0.28.1 for torch {torch.__version__} with tools/build_horovod.py from "
        "poseidon_hvd's sources."
    ) from error

if not getattr(horovod_torch, "_MPI_LIB_AVAILABLE", False):
    raise ImportError(
        f"Horovod {horovod.__version__} is installed without its PyTorch library, or built for another torch than "
        f"{torch.__version__} (see the message above). Rebuild Horovod with tools/build_horovod.py "
        "from poseidon_hvd's sources."
    )

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        f"poseidon_hvd's extension does not load with torch {torch.__version__} and Horovod {horovod.__version__}: "
        f"{error}. {_REBUILD}"
    ) from error


def _check() -> None:
    if _C.horovod_version != horovod.__version__:
        raise ImportError(
            f"poseidon_hvd was built for Horovod {_C.horovod_version}, but Horovod {horovod.__version__} is "
            f"installed. {_REBUILD}"
        )
    if _C.torch_version != torch.__version__:
        raise ImportError(
            f"poseidon_hvd was built for torch {_C.torch_version}, but torch {torch.__version__} is "
            f"installed. {_REBUILD}"
        )
    try:
        _C.check_horovod_layout()
    except RuntimeError as error:
        raise ImportError(f"{error} (Horovod {horovod.__version__}, torch {torch.__version__})") from None
    from horovod.torch import mpi_lib_v2

    bound = _C.horovod_library_path()
    if not os.path.exists(bound) or not os.path.samefile(bound, mpi_lib_v2.__file__):
        raise ImportError(
            f"poseidon_hvd is bound to {bound or 'an unknown library'} instead of Horovod's PyTorch library "
            f"{mpi_lib_v2.__file__}. Another framework's Horovod was imported first; import poseidon_hvd before it."
        )


_check()
_C.set_exceptions(horovod_torch.HorovodInternalError)
