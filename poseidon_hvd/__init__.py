"""Horovod for PyTorch with sufficient factor broadcasting.

``import poseidon_hvd as hvd`` instead of ``import horovod.torch as hvd``: everything that ``horovod.torch`` exports is
here, and ``DistributedOptimizer`` is ours. So is ``run``, the one function of the package ``horovod`` itself.
"""

from horovod import run  # not in __all__: from horovod.torch import * does not give it

from . import _native  # first: loads torch, Horovod and the extension in the right order
from ._exports import reexport

__version__ = "0.1.0"
__all__ = reexport(globals())
