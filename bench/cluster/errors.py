"""Errors of the virtual cluster. Each message says what is wrong and what to do about it."""

__all__ = ["ClusterError", "RunTimeout"]


class ClusterError(RuntimeError):
    """The cluster cannot be made, found or used."""


class RunTimeout(ClusterError):
    """A command outlived its time limit and was ended together with everything it had started."""
