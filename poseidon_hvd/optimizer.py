"""The class that ``DistributedOptimizer`` puts between the user's optimizer class and its instance."""

import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Callable, Optional, Union

import torch
from horovod.torch.mpi_ops import ProcessSet, global_process_set

from . import _runtime, _views
from ._hooks import Hooks, register_reduction_hook, remove_reduction_hook
from ._native import _C
from ._parameters import check_groups, name_parameters
from ._session import index_groups, open_session
from .config import Config

__all__ = ["DistributedOptimizer"]

# None: Horovod's own limit, as many as fit an int. Tests make it small.
_MAX_GATHERED_ELEMENTS: Optional[int] = None


class _DistributedOptimizer(torch.optim.Optimizer):
    """Methods of the class that DistributedOptimizer makes on top of the user's optimizer class.

    As in Horovod there is exactly one level between it and the user's class, and ``__module__`` is Horovod's:
    ``broadcast_optimizer_state`` tells by it whose plain ``step`` to call.
    """

    __module__ = "horovod.torch.optimizer"

    # Set by the factory: the class itself, for super(), because a user may subclass it; and what was wrapped.
    _distributed_class: Any
    _creation: int  # set by World.watch(): the number of the optimizer in this process
    _wrapped_from: "weakref.ref[torch.optim.Optimizer]"
    # Set by open_session().
    _tag: str
    _logged_schemes: Optional[list[str]]

    def _setup(
        self,
        named_parameters: Optional[Iterable[tuple[str, torch.Tensor]]],
        compression: Any,
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        groups: Union[None, int, list[list[torch.Tensor]]],
        sparse_as_dense: bool,
        process_set: ProcessSet,
        config: Config,
    ) -> None:
        self._compression = compression
        self._parameter_names = name_parameters(self.param_groups, named_parameters)
        self.backward_passes_per_step = backward_passes_per_step
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self._world = _runtime.current_world()
        self.process_set = self._world.process_set(process_set)
        self._groups = check_groups(groups)
        self._config = config
        self._hooks = Hooks()
        self._synchronized = False
        self._should_synchronize = True
        # Parameters whose hooks after reduction have run in this step.
        self._hooked_in_backward: frozenset[int] = frozenset()
        self._session: Optional[_C.Session] = None
        self._params: list[torch.Tensor] = []
        self._open_session()
        self._world.watch(self)

    # ---- Session: everything that happens between ranks

    def _open_session(self, tag: Optional[str] = None) -> None:
        """Local: no rank waits for another here. ``tag``: None for the next number."""
        open_session(self, tag=tag, max_gathered_elements=_MAX_GATHERED_ELEMENTS)

    def _close_session(self) -> None:
        self._session = None

    def _note_join(self) -> None:
        if self._session is not None:
            self._session.note_join()

    def _note_wait(self) -> None:
        if self._session is not None:
            self._session.note_wait()

    def _reopen_session(self) -> None:
        # Process sets other than the global one are not registered yet at this moment; the next call that needs one
        # looks again.
        if self._session is None and self.process_set is global_process_set:
            self._open_session()

    def _current_session(self) -> Optional[_C.Session]:
        """The session, or None where nothing is to be exchanged."""
        if self._session is None and self.process_set.included():
            self._open_session()
        return self._session

    # ---- Horovod's interface

    def synchronize(self) -> None:
        """Waits until every gradient has been reduced.

        It sends what has not been sent, zeros for parameters that got no gradient. Afterwards ``p.grad`` holds the
        reduced gradient on every rank. With ``reduce_in="backward"`` the gradients that all ranks complete are reduced
        already. ``synchronize()`` leaves them as the user has made them since and does not wait for them.

        Raises:
            HorovodInternalError: Horovod failed, for example because another rank has died.
            ValueError: ranks disagree (settings, parameters, shapes); the message names the difference.
            RuntimeError: a reduction hook raised an exception, a gradient was removed since it was sent, or this is a
                forked child; the message names the parameter.
        """
        included = self.process_set.included()
        session = self._current_session() if included else None
        if session is not None:
            session.synchronize()
            for message in session.take_warnings():
                warnings.warn(f"poseidon_hvd: {message}", stacklevel=1)
            if self._config.log_plans:
                _views.log_new_plan(self)
        elif included:
            self._hooks.before_all(self._params)
        self._synchronized = True
        if included:
            self._hooks.after_all(self._params, self._hooked_in_backward)
            self._hooked_in_backward = frozenset()

    def _reduce_in_backward(self) -> None:
        """Called at the end of a backward that may have completed the step, where there are hooks after reduction."""
        session = self._session
        if session is not None and session.reduce_in_backward():
            reduced = frozenset(session.collected_parameters())
            self._hooks.after_all(self._params, frozenset(range(len(self._params))) - reduced)
            self._hooked_in_backward = reduced

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside it ``step()`` does not synchronize, because ``synchronize()`` was called before.

        For example::

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Synchronizes, then runs the wrapped optimizer's step.

        With a closure it synchronizes the gradients that the closure computes, every time the closure is called.
        """
        if self._should_synchronize and closure is not None:
            if self._handles:
                self.synchronize()
            user_closure = closure

            def closure() -> Any:
                loss = user_closure()
                self.synchronize()
                return loss

        elif self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This reduces the gradients a second time. Use "
                    "optimizer.skip_synchronize() if you call optimizer.synchronize().",
                    stacklevel=1,
                )
            self.synchronize()
        self._synchronized = False
        wrapped_from: Any = self._wrapped_from()
        if wrapped_from is not None:
            wrapped_from._opt_called = True  # for a scheduler that was made on it before it was wrapped
        result = super(self._distributed_class, self).step(closure)
        if self._session is not None:
            self._session.note_updated()
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros gradients as the wrapped optimizer does, ``set_to_none`` included.

        Gradients that ``backward()`` has reduced may be cleared. The step is discarded, and the next ``backward()``
        begins another.

        Raises:
            AssertionError: gradients are still being reduced. This is always so with ``reduce_in="step"``, else where
                some rank did not complete them in ``backward()``, or between passes.
        """
        session = self._session
        if session is not None and not session.discard():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        result = super(self._distributed_class, self).zero_grad(*args, **kwargs)
        self._hooked_in_backward = frozenset()
        if session is not None:
            session.note_zeroed()
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters. All ranks do so alike, between steps.

        The next step observes again, and a new plan is made.
        """
        if self._handles:
            raise RuntimeError("add_param_group() was called while gradients are being reduced. Call it after step().")
        super(self._distributed_class, self).add_param_group(param_group)
        group = len(self.param_groups) - 1
        for index, p in enumerate(self.param_groups[-1]["params"]):
            self._parameter_names.setdefault(p, f"allreduce.noname.{group}.{index}")
        self._open_session()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self._session is not None:
            self._session.reset()
        self._synchronized = False
        self._should_synchronize = True
        return super(self._distributed_class, self).load_state_dict(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes to accumulate before a step, from now on."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = passes
        if self._session is not None:
            self._session.set_passes_per_step(passes)

    # ---- Ours

    register_reduction_hook = register_reduction_hook
    _remove_reduction_hook = remove_reduction_hook
    weigh = _views.weigh
    scheme_report = _views.scheme_report
    plan = _views.plan
    stats = _views.stats

    # ---- Views of the session under the names that Horovod's users read

    @property
    def _handles(self) -> dict[torch.Tensor, tuple[Any, Any]]:
        if self._session is None:
            return {}
        return {self._params[i]: (None, None) for i in self._session.touched_parameters()}

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        if self._session is None:
            return dict.fromkeys(self._params, self.backward_passes_per_step)
        return dict(zip(self._params, self._session.delays()))

    @property
    def _p_to_group(self) -> dict[torch.Tensor, tuple[torch.Tensor, ...]]:
        groups = [tuple(self._params[i] for i in group) for group in index_groups(self)]
        return {p: group for group in groups for p in group}

    @property
    def _grad_accs(self) -> list[Any]:
        return []  # the session holds the gradient accumulators

    def _register_hooks(self) -> None:
        """Opens the session, which registers the hooks."""
        self._current_session()

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        return set() if self._session is None else {self._params[i] for i in self._session.active_parameters()}


# Users import it from here, as from horovod.torch.optimizer. It needs the class above.
from .distribute import DistributedOptimizer  # noqa: E402
