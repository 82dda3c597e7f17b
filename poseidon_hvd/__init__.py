"""Horovod for PyTorch with sufficient factor broadcasting.

``import poseidon_hvd as hvd`` instead of ``import horovod.torch as hvd``: everything that ``horovod.torch`` exports is
here, and ``DistributedOptimizer`` is ours. So is ``run``, the one function of the package ``horovod`` itself.
"""

from . import _native  # first: loads torch, Horovod and the extension in the right order
from ._exports import reexport

# Not in __all__: from horovod.torch import * does not give it.
run = _native.horovod.run

__version__ = "0.1.0"
__all__ = reexport(globals())
