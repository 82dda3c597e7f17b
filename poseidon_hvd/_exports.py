"""Everything public of ``horovod.torch`` under our name, so that replacing the module's name in a script is enough."""

import sys
from typing import Any

from . import optimizer as _optimizer
from ._native import horovod_torch

_SUBMODULES = ("compression", "elastic", "functions", "mpi_ops", "sync_batch_norm", "mpi_lib_v2")
# horovod.torch has these without an underscore-free name, and scripts use them.
_PRIVATE = ("_MPI_LIB_AVAILABLE", "_check_has_gpu", "check_extension")


def reexport(namespace: dict[str, Any]) -> list[str]:
    """Fills a package's namespace and registers Horovod's submodules below its name. Returns ``__all__``."""
    package = namespace["__name__"]
    public = [name for name in dir(horovod_torch) if not name.startswith("_")]
    for name in (*public, *_PRIVATE):
        namespace[name] = getattr(horovod_torch, name)
    for name in _SUBMODULES:
        module = getattr(horovod_torch, name)
        namespace[name] = module
        sys.modules[f"{package}.{name}"] = module
        for full in [full for full in sys.modules if full.startswith(f"horovod.torch.{name}.")]:
            sys.modules[package + full[len("horovod.torch") :]] = sys.modules[full]
    namespace["optimizer"] = _optimizer
    sys.modules[f"{package}.optimizer"] = _optimizer
    namespace["DistributedOptimizer"] = _optimizer.DistributedOptimizer
    return sorted({*public, "optimizer", "DistributedOptimizer"})
