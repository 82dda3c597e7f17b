"""The same as ``poseidon_hvd``: for scripts in which ``horovod.torch`` is replaced by ``poseidon_hvd.torch``."""

from .._exports import reexport

__all__ = reexport(globals())
