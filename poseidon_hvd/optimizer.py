"""``DistributedOptimizer``: Horovod's, with sufficient factor broadcasting for the layers where it pays."""

import collections
import fnmatch
import math
import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Callable, Optional, Union

import torch
from horovod.common.util import split_list
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Adasum, Average, ProcessSet, global_process_set, rocm_built
from horovod.torch.optimizer import DistributedOptimizer as _horovod_distributed_optimizer

from . import _runtime
from ._hooks import Hook, HookHandle, Hooks
from ._native import _C
from ._parameters import all_parameters, check_groups, name_parameters
from .config import Config
from .report import plan_table

__all__ = ["DistributedOptimizer"]

# None: Horovod's own limit, as many as fit an int. Tests make it small.
_MAX_GATHERED_ELEMENTS = None

# Anything else is a compressor of the user's own.
_COMPRESSION_KINDS = {Compression.none: "none", Compression.fp16: "fp16"}


class _DistributedOptimizer(torch.optim.Optimizer):
    """Methods of the class that DistributedOptimizer makes on top of the user's optimizer class.

    As in Horovod there is exactly one level between it and the user's class, and ``__module__`` is Horovod's:
    ``broadcast_optimizer_state`` tells by it whose plain ``step`` to call.
    """

    __module__ = "horovod.torch.optimizer"

    def _setup(
        self,
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
        config,
    ):
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
        self._hooked_in_backward = frozenset()  # parameters whose hooks after reduction have run in this step
        self._session = None
        self._params = []
        self._open_session()
        self._world.watch(self)

    # ---- Session: everything that happens between ranks

    def _open_session(self, tag=None):
        """Local: no rank waits for another here. ``tag``: None for the next number."""
        # By name, so that the order is the same on every rank whatever container the parameters came from.
        self._session = None  # the old one lets go of the parameters before another takes them
        self._params = sorted(all_parameters(self), key=self._parameter_names.__getitem__)
        names = [self._parameter_names[p] for p in self._params]
        overrides = self._config.overrides(names)  # validates, also where nothing will be sent
        self._hooks.resolve(names)
        if not self.process_set.included() or (
            self.process_set.size() == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"
        ):
            self._session = None
            return
        groups = self._index_groups()
        compression = _COMPRESSION_KINDS.get(self._compression, "python")
        average = self.op == Average
        uneven_steps = self._config.uneven_steps and self.process_set.process_set_id == 0  # hvd.join() knows no other
        schemes = ",".join(f"{name}:{scheme}" for name, scheme in zip(names, overrides) if scheme != "auto")
        settings = {
            "policy": self._config.policy,
            "schemes": schemes,
            "op": self.op,
            "compression": getattr(self._compression, "__name__", str(self._compression)),
            "gradient_predivide_factor": self.gradient_predivide_factor,
            "sparse_as_dense": self.sparse_as_dense,
            "groups": ";".join(",".join(names[i] for i in group) for group in groups),
            "network": self._config.network,
            "memory_limit": self._config.memory_limit,
            "uneven_steps": uneven_steps,
            "dense": self._config.dense,
            "reduce_in": self._config.reduce_in,
            "hooks before reduction": ",".join(self._hooks.names_before),
        }
        self._logged_schemes = None
        self._tag = self._world.session_tag(self.process_set.process_set_id) if tag is None else tag
        self._contexts = {}
        self._session = _C.Session(
            engine=self._world.engine(),
            names=names,
            params=self._params,
            groups=groups,
            op=self.op,
            prescale=1.0 / self.gradient_predivide_factor if average else 1.0,
            postscale=self.gradient_predivide_factor if average else 1.0,
            passes_per_step=self.backward_passes_per_step,
            compression=compression,
            compress=_compressor(self._compression, self._contexts) if compression == "python" else None,
            sparse_as_dense=self.sparse_as_dense,
            process_set=self.process_set.process_set_id,
            rank=self.process_set.rank(),
            size=self.process_set.size(),
            tag=self._tag,
            policy=self._config.policy,
            overrides=overrides,
            max_gathered_elements=_MAX_GATHERED_ELEMENTS,
            settings="\n".join(f"{key}={value}" for key, value in settings.items()),
            network=self._config.network,
            gather_memory_bytes=self._config.memory_limit,
            uneven_steps=uneven_steps,
            dense=self._config.dense,
            before=self._hooks.caller(),
            hooked=self._hooks.hooked,
            reduce_in_backward=self._config.reduce_in == "backward",
            reduce=_reducer(self),
        )
        self._session.set_hooks_after(self._hooks.any_after)

    def _close_session(self):
        self._session = None

    def _note_join(self):
        if self._session is not None:
            self._session.note_join()

    def _note_wait(self):
        if self._session is not None:
            self._session.note_wait()

    def _reopen_session(self):
        # Process sets other than the global one are not registered yet at this moment; the next call that needs one
        # looks again.
        if self._session is None and self.process_set is global_process_set:
            self._open_session()

    def _current_session(self):
        """The session, or None where nothing is to be exchanged."""
        if self._session is None and self.process_set.included():
            self._open_session()
        return self._session

    # ---- Horovod's interface

    def synchronize(self):
        """Waits until every gradient has been reduced.

        Sends what has not been sent: zeros for parameters that got no gradient. Afterwards ``p.grad`` holds the reduced
        gradient on every rank. With ``reduce_in="backward"`` those that all ranks complete are reduced already, are
        left as the user has made them since, and are not waited for.

        Raises:
            HorovodInternalError: Horovod failed, for example because another rank has died.
            ValueError: ranks disagree (settings, parameters, shapes); the message names the difference.
            RuntimeError: a reduction hook raised an exception, a gradient was removed since it was sent, or this is a
                forked child; the message names the parameter.
        """
        included = self.process_set.included()
        session = self._current_session() if included else None
        if session is not None:
            self._reduce(session.flush(), session.finish)
            for message in session.take_warnings():
                warnings.warn(f"poseidon_hvd: {message}")
            if self._config.log_plans:
                self._log_new_plan()
        elif included:
            self._hooks.before_all(self._params)
        self._synchronized = True
        if included:
            self._hooks.after_all(self._params, self._hooked_in_backward)
            self._hooked_in_backward = frozenset()

    def _reduce_in_backward(self):
        """At the end of a backward that may have completed the step, where reducing needs Python."""
        session = self._session
        sparse = session.begin_reduce() if session is not None else None
        if sparse is not None:
            self._reduce(sparse, session.collect)
            reduced = frozenset(session.collected_parameters())
            self._hooks.after_all(self._params, frozenset(range(len(self._params))) - reduced)
            self._hooked_in_backward = reduced

    def _reduce(self, sparse, collect):
        """Sparse gradients and compressors of the user's own take Horovod's way in Python; ``collect`` waits for
        everything else.
        """
        handles = [(i, self._sparse_async(self._params[i])) for i in sparse]
        compressed = collect()
        with torch.no_grad():
            for i, handle in handles:
                grad = self._params[i].grad
                grad.zero_().add_(self._compression.decompress(handle(), grad.dtype))
            for i, tensor in compressed:
                self._params[i].grad.copy_(self._compression.decompress(tensor, self._contexts.pop(i)))

    def _sparse_async(self, p):
        """Sparse gradients go Horovod's own way; a rank without one contributes no rows."""
        if p.grad is None:
            p.grad = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64), torch.empty(0, *p.shape[1:], dtype=p.dtype), p.shape
            )
        elif not p.grad.is_sparse:
            p.grad = p.grad.to_sparse(1)
        name = f"poseidon.{self._tag}.sparse.{self._parameter_names[p]}"
        return self._world.sparse_allreduce_async(p.grad, name=name, op=self.op, process_set=self.process_set)

    def _log_new_plan(self):
        plan = self.plan()
        schemes = plan and [tensor["scheme"] for tensor in plan["tensors"]]
        if schemes != self._logged_schemes and self.process_set.rank() == 0:
            print(
                f"[poseidon_hvd] plan made at step {plan['made_at_step']}\n{self.scheme_report()}",
                file=sys.stderr,
                flush=True,
            )
        self._logged_schemes = schemes

    @contextmanager
    def skip_synchronize(self):
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

    def step(self, closure=None):
        """Synchronizes, then does the wrapped optimizer's step.

        With a closure the gradients that it computes are synchronized, every time it is called.
        """
        if self._should_synchronize and closure is not None:
            if self._handles:
                self.synchronize()
            user_closure = closure

            def closure():
                loss = user_closure()
                self.synchronize()
                return loss

        elif self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This "
                    "reduces the gradients a second time. Use optimizer.skip_synchronize() if you call optimizer.synchronize()."
                )
            self.synchronize()
        self._synchronized = False
        wrapped_from = self._wrapped_from()
        if wrapped_from is not None:
            wrapped_from._opt_called = True  # for a scheduler that was made on it before it was wrapped
        result = super(self._distributed_class, self).step(closure)
        if self._session is not None:
            self._session.note_updated()
        return result

    def zero_grad(self, *args, **kwargs):
        """As the wrapped optimizer's, ``set_to_none`` included.

        Gradients that ``backward()`` has reduced may be cleared: the step is discarded, and the next ``backward()``
        begins another.

        Raises:
            AssertionError: gradients are still being reduced: always with ``reduce_in="step"``, else where some rank
                did not complete them in ``backward()``, or between passes.
        """
        session = self._session
        if session is not None and not session.discard():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
                "This is prohibited as it can cause a race condition."
            )
        result = super(self._distributed_class, self).zero_grad(*args, **kwargs)
        self._hooked_in_backward = frozenset()
        if session is not None:
            session.note_zeroed()
        return result

    def add_param_group(self, param_group):
        """Parameters may be added between steps, on all ranks alike; the next step observes again and makes a new
        plan.
        """
        if self._handles:
            raise RuntimeError("add_param_group() was called while gradients are being reduced. Call it after step().")
        super(self._distributed_class, self).add_param_group(param_group)
        group = len(self.param_groups) - 1
        for index, p in enumerate(self.param_groups[-1]["params"]):
            self._parameter_names.setdefault(p, f"allreduce.noname.{group}.{index}")
        self._open_session()

    def load_state_dict(self, *args, **kwargs):
        if self._session is not None:
            self._session.reset()
        self._synchronized = False
        self._should_synchronize = True
        return super(self._distributed_class, self).load_state_dict(*args, **kwargs)

    def set_backward_passes_per_step(self, passes):
        """The number of backward passes to accumulate before a step, from now on."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = passes
        if self._session is not None:
            self._session.set_passes_per_step(passes)

    # ---- Ours

    def register_reduction_hook(
        self,
        before: Optional[Callable[[str, torch.Tensor], None]] = None,
        after: Optional[Callable[[str, torch.Tensor], None]] = None,
        parameters: Union[str, Sequence[str]] = "*",
    ) -> HookHandle:
        """Functions that see gradients around their reduction and may change them in place.

        A parameter with a hook ``before`` is sent whole, never as factors or rows: the local gradient of a factored
        layer is not computed. So registering or removing one makes the next step observe again and make a new plan.
        Without a hook nothing changes.

        Args:
            before: called as ``before(name, grad)`` with this rank's local gradient, of all passes of the step, just
                before it is sent: on autograd's threads, in ``synchronize()`` after fewer passes. Not called where
                there is no gradient. A sparse gradient is sparse.
            after: called as ``after(name, grad)`` with the reduced gradient, where it is reduced: at the end of
                ``backward()`` or in ``synchronize()``; in the order of names.
            parameters: pattern of names (``fnmatch``), or several; also of parameters that are added later.

        Both run without gradient recording and return None; several run in the order in which they were registered. All
        ranks register the same ``before``, before the first step or between the same two steps; with one rank they run
        too.

        Returns:
            A handle whose ``remove()`` takes the hook out of service.

        Raises:
            ValueError: no function, or a pattern that matches no parameter.
            RuntimeError: ``before`` is registered while gradients are being reduced. An exception in a hook is raised
                as one too, by ``backward()`` or ``synchronize()``, and names the parameter.
        """
        if before is None and after is None:
            raise ValueError("register_reduction_hook() needs a function: before, after or both.")
        patterns = (parameters,) if isinstance(parameters, str) else tuple(parameters)
        names = [self._parameter_names[p] for p in all_parameters(self)]
        unknown = [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]
        if unknown or not patterns:
            shown = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(
                f"register_reduction_hook: parameters={unknown or patterns!r} matches none of this optimizer's: {shown}."
            )
        hook = Hook(before, after, patterns)
        self._change_hooks(self._hooks.add, hook)
        return HookHandle(self, hook)

    def _remove_reduction_hook(self, hook):
        if hook in self._hooks:
            self._change_hooks(self._hooks.remove, hook)

    def _change_hooks(self, change, hook):
        if hook.before is not None and self._handles:
            raise RuntimeError(
                "A hook before reduction was registered or removed while gradients are being reduced. Do it after step()."
            )
        change(hook)
        if hook.after is not None and self._session is not None:
            self._session.set_hooks_after(self._hooks.any_after)
        if hook.before is not None:
            # Before the first step under its old number: ranks that register differently must meet, or they could not
            # find that out. A plan is there on all ranks or on none; of steps a rank that joined early has done fewer.
            unused = self._session is not None and self._session.plan() is None
            self._open_session(tag=self._tag if unused else None)

    def weigh(self, loss: torch.Tensor, samples: Union[int, float]) -> torch.Tensor:
        """The loss of a batch, scaled so that the averaged gradient is the mean over all samples of all ranks.

        Horovod's average counts ranks alike, whatever number of samples each had. Call it between forward and backward,
        on all ranks, once for each backward pass; a rank in ``hvd.join()`` counts no samples. Costs an allreduce of one
        number, for which it waits::

            loss = optimizer.weigh(F.cross_entropy(model(x), y), len(x))
            loss.backward()

        Args:
            loss: the mean over this rank's samples, of any shape.
            samples: how many there were, 0 or more; or the sum of their weights.

        Returns:
            ``loss * samples * size / total``, with ``size`` ranks and ``total`` samples of all of them. To log, use
            ``loss`` itself.

        Raises:
            ValueError: ``op`` is not ``Average``; ``samples`` is negative or no number; or it is 0 and the loss is not
                finite, such as the mean over an empty batch.
        """
        if self.op != Average:
            raise ValueError(
                "weigh() is for op=hvd.Average. With op=hvd.Sum use the sum over this rank's samples as its loss."
            )
        try:
            count = float(samples)
        except (TypeError, ValueError, RuntimeError):
            count = math.nan
        if not (math.isfinite(count) and count >= 0):
            raise ValueError(f"weigh: samples={samples!r} is not a number of 0 or more.")
        session = self._current_session()
        total = count if session is None else session.sum_over_ranks("samples", count)
        if count == 0 and not torch.isfinite(loss).all():
            raise ValueError(
                "weigh: samples is 0 and the loss is not finite, so the gradient of all ranks might not be either. On a rank "
                "without samples use a finite loss, such as model(x).sum()."
            )
        size = 1 if session is None else self.process_set.size()
        return loss * (count * size / total if total > 0 else 0.0)

    def scheme_report(self) -> str:
        """A table of every tensor's scheme, what each scheme would send and take, and why this one; text for a
        terminal.
        """
        size = self.process_set.size() if self.process_set.included() else 0
        return plan_table(self.plan(), policy=self._config.policy, size=size)

    def plan(self) -> Optional[dict[str, Any]]:
        """The plan in force as plain data, for programs and ``json.dump``; None until the first step is over.

        Returns:
            ``policy``; ``size``, the ranks; ``made_at_step``; ``tensors``, in the order of names, each with ``name``,
            ``shape``, ``rows`` (of all ranks together in that step), ``scheme``, ``reason`` and ``costs``: scheme ->
            ``bytes`` that each rank sends in a step, mean over ranks, and ``seconds``: transfer and the tensor's own
            work alone, nothing hidden; both None where the scheme cannot be used or they are not known. With policy
            ``"time"`` also ``network`` (``alpha_seconds`` and ``beta_seconds_per_byte`` of ``allreduce``, per byte of
            tensor, and of ``allgather``, per byte gathered from all ranks; ``skew_seconds``, by which the first rank
            waited for the last), ``network_load`` (``allreduce``, ``allgather``: how many times slower than when it was
            measured idle the network was in the steps observed), ``predicted_step_seconds``, ``exposed_seconds`` (of
            it, communication that backward does not hide) and ``predicted_dense_step_seconds``, with everything
            allreduced; otherwise None. ``dense``: the ``method`` that puts allreduced gradients together and its
            ``slices``, lists of the names that travel in one message, in the order of sending; a name that is in
            several of them travels in parts, one in none by itself.
        """
        plan = self._session.plan() if self._session is not None else None
        if plan is None:
            return None
        shapes = {self._parameter_names[p]: list(p.shape) for p in self._params}
        chosen, dense = plan["predicted"] or {}, plan["predicted_dense"] or {}
        return {
            "policy": self._config.policy,
            "size": plan["size"],
            "made_at_step": plan["made_at_step"],
            "network": plan["network"],
            "network_load": plan["network_load"] if plan["network"] else None,
            "predicted_step_seconds": chosen.get("step_seconds"),
            "exposed_seconds": chosen.get("exposed_seconds"),
            "predicted_dense_step_seconds": dense.get("step_seconds"),
            "dense": plan["dense"],
            "tensors": [
                {
                    "name": d["name"],
                    "shape": shapes[d["name"]],
                    "rows": d["global_rows"],
                    "scheme": d["scheme"],
                    "reason": d["reason"],
                    "costs": {
                        "allreduce": {"bytes": d["allreduce_bytes"], "seconds": d["allreduce_seconds"]},
                        "sfb": _cost(d["sfb_bytes"], d["gather_seconds"]),
                        "row-sparse": _cost(d["row_sparse_bytes"], d["gather_seconds"]),
                    },
                }
                for d in plan["tensors"]
            ],
        }

    def stats(self) -> dict[str, Any]:
        """Counters since the start.

        Returns:
            ``steps``; ``synchronize_seconds``, the time that ``backward()`` and ``synchronize()`` blocked;
            ``early_messages``, how many messages of factors or rows left from their layer's own backward node, before
            its input-gradient GEMM; and ``schemes``: for ``"allreduce"``, ``"sfb"`` and ``"row-sparse"`` a dict with
            ``tensors`` (gradients exchanged), ``collectives``, ``wire_bytes`` (payload that this rank sent, mean over
            ranks), ``horovod_wire_bytes`` (what an allreduce of the same gradients would have sent),
            ``waited_seconds``, and the stages ``pack_seconds``, ``queue_seconds``, ``wire_seconds``,
            ``handoff_seconds``, ``rebuild_seconds``, summed over exchanges, which overlap. ``dense``: of gradients in
            the plan's ``slices``, the allreduces (``slices``), the bytes reduced where they lay (``in_place_bytes``)
            and those copied into a message (``copied_bytes``).
        """
        if self._session is not None:
            return self._session.stats()
        keys = (
            "tensors",
            "collectives",
            "wire_bytes",
            "horovod_wire_bytes",
            "waited_seconds",
            "pack_seconds",
            "queue_seconds",
            "wire_seconds",
            "handoff_seconds",
            "rebuild_seconds",
        )
        schemes = {name: dict.fromkeys(keys, 0) for name in ("allreduce", "sfb", "row-sparse")}
        dense = dict.fromkeys(("slices", "in_place_bytes", "copied_bytes"), 0)
        return {"steps": 0, "synchronize_seconds": 0.0, "early_messages": 0, "schemes": schemes, "dense": dense}

    # ---- Views of the session under the names that Horovod's users read

    def _index_groups(self) -> list[list[int]]:
        if self._groups is None:
            return []
        index = {p: i for i, p in enumerate(self._params)}
        if isinstance(self._groups, list):
            groups = [[index[p] for p in group if p in index and p.requires_grad] for group in self._groups]
        else:
            ordered = [index[p] for p in all_parameters(self) if p.requires_grad]
            groups = split_list(ordered, self._groups)
        return [group for group in groups if len(group) > 1]

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
        groups = [tuple(self._params[i] for i in group) for group in self._index_groups()]
        return {p: group for group in groups for p in group}

    @property
    def _grad_accs(self) -> list:
        return []  # the session holds the gradient accumulators

    def _register_hooks(self):
        """Hooks are the session's."""
        self._current_session()

    @property
    def _requires_update(self) -> set:
        return set() if self._session is None else {self._params[i] for i in self._session.active_parameters()}


def _drop_state(optimizer) -> None:
    """As Horovod.

    Its examples call broadcast_optimizer_state before wrapping, which leaves the state of a step that never was.
    """
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    if any(step > 1 for step in steps):
        warnings.warn(
            "poseidon_hvd: the state of the optimizer (moments, step counts) is not taken over when it is wrapped, as in Horovod. "
            "Load it after wrapping.",
            stacklevel=3,
        )
    optimizer.state = collections.defaultdict(dict)


def _cost(bytes_sent: Optional[float], seconds: Optional[float]) -> dict[str, Optional[float]]:
    return {"bytes": bytes_sent, "seconds": None if bytes_sent is None else seconds}


def _reducer(optimizer):
    """For the session, which must not keep the optimizer alive."""
    reference = weakref.ref(optimizer)

    def reduce():
        optimizer = reference()
        if optimizer is not None:
            optimizer._reduce_in_backward()

    return reduce


def _compressor(compression, contexts):
    def compress(index, grad):
        tensor, contexts[index] = compression.compress(grad)
        return tensor

    return compress


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Optional[Iterable[tuple[str, torch.Tensor]]] = None,
    compression=Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Optional[Union[int, list[list[torch.Tensor]]]] = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    policy: Optional[str] = None,
    schemes: Optional[Mapping[str, str]] = None,
    network: Union[None, str, Mapping[str, Any]] = None,
    memory_limit: Optional[float] = None,
    uneven_steps: Optional[bool] = None,
    dense: Optional[str] = None,
    reduce_in: Optional[str] = None,
) -> torch.optim.Optimizer:
    """An optimizer that reduces gradients over all ranks before each step, the cheaper way for each tensor.

    A drop-in for ``horovod.torch.DistributedOptimizer``: same arguments, defaults and behaviour. In addition the
    gradient of a fully connected layer may travel as its sufficient factors, the rows of its input x (K x N) and of its
    output's gradient d (K x M), from which every rank rebuilds ``d^T x`` (Poseidon, arXiv 1706.03292, section 3.2), and
    that of an embedding table as the rows that were touched, equal ids merged. The first step runs dense and is
    observed; then rank 0 chooses a scheme per tensor and all ranks follow. See ``scheme_report()`` and ``stats()`` of
    the result.

    Args:
        optimizer: the optimizer to wrap. Its hyperparameters and attributes are kept; its state is not, as in Horovod:
            load it after wrapping.
        named_parameters: names of the parameters, usually ``model.named_parameters()``; the same on every rank.
        compression: ``Compression.none``, ``Compression.fp16`` (gradients and factors travel in float16) or a
            compressor class (its gradients are always allreduced).
        backward_passes_per_step: backward passes to accumulate locally before a step; their gradients are summed.
        op: ``Average``, ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum`` (Horovod's own implementation). SFB is for
            averages and sums.
        gradient_predivide_factor: for ``Average``: divide by it before the sum and multiply after.
        num_groups: deprecated, use ``groups``.
        groups: number of groups, or lists of parameters, whose gradients are reduced together; these are always
            allreduced.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks that take part.
        policy: ``"time"`` (default: what makes the predicted step shortest, from a second of measurements in the first
            step), ``"bytes"`` (what sends fewer bytes), ``"allreduce"`` or ``"sfb"`` (wherever it is possible, and
            row-sparse for embeddings); default from ``POSEIDON_POLICY``.
        schemes: pattern of parameter names -> ``"auto"``, ``"allreduce"``, ``"sfb"`` or, for embedding tables,
            ``"row-sparse"``; default from ``POSEIDON_SCHEMES`` (``"fc*.weight=sfb,head.weight=allreduce"``). A layer is
            named by its weight; its bias goes with it.
        network: policy ``"time"`` takes these instead of measuring: what ``plan()["network"]`` was, or a JSON file with
            it; default from ``POSEIDON_ALPHA_ALLREDUCE`` (s), ``POSEIDON_BETA_ALLREDUCE`` (s/byte), ``.._ALLGATHER``,
            or the file ``POSEIDON_PROFILE``.
        memory_limit: bytes that gathered rows may take on each rank under policy ``"time"``; default from
            ``POSEIDON_MEMORY_LIMIT_MB``, else 2 GB.
        uneven_steps: ranks may call ``hvd.join()`` while others still train, as with plain Horovod. Costs an allreduce
            of one number per step, and in steps in which a rank is missing everything is allreduced; default from
            ``POSEIDON_UNEVEN_STEPS`` (0 or 1), else False.
        dense: how gradients that are allreduced are put together. ``"auto"`` (default): as makes the predicted step
            shortest, from the same measurements. ``"lazy"`` or ``"lazy:BYTES"``: a message for every so many bytes (4
            MiB), in the order of backward (GradientFlow, arXiv 1902.06855, section 3.1), the same in every run.
            ``"merged"``: MG-WFBP (arXiv 1811.11141). ``"wfbp"``: one message each. ``"bsp"``: one after backward.
            ``"priority"``: parts of so many bytes, front layers first (ByteScheduler). ``"horovod"``: left to Horovod's
            fusion. Default from ``POSEIDON_DENSE``.
        reduce_in: ``"backward"`` (default): gradients are reduced, in place and visible, when ``backward()`` returns,
            so what a script then does to ``.grad`` acts as in one process. ``"step"``: in ``synchronize()`` or
            ``step()``, as in Horovod, so that work between ``backward()`` and ``step()`` overlaps with communication.
            Default from ``POSEIDON_REDUCE_IN``.

    Returns:
        An instance of a subclass of the optimizer's class, with Horovod's ``synchronize()`` and ``skip_synchronize()``.

    Raises:
        ValueError: an argument that Horovod would refuse, an unknown policy, scheme, pattern or method, or a network
            that cannot be read.
        TypeError: ``torch.optim.LBFGS``, which calls its closure a different number of times on each rank.
    """
    if gradient_predivide_factor != 1.0:
        if rocm_built():
            raise ValueError("gradient_predivide_factor not supported yet with ROCm")
        if op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "torch.optim.LBFGS cannot be distributed: each rank would evaluate its closure, and so reduce gradients, a different "
            "number of times and wait for the others for ever."
        )
    config = Config.resolve(policy, schemes, network, memory_limit, uneven_steps, dense, reduce_in)
    horovod_size = _runtime.current_world().size()  # raises if Horovod is not initialized

    own_path = None
    if op == Adasum and horovod_size > 1:
        own_path = "op=Adasum reduces updates instead of gradients"
    elif any(p.device.type != "cpu" for group in optimizer.param_groups for p in group["params"]):
        own_path = "this version exchanges gradients of CPU tensors only"
    if own_path is not None:
        if config.policy != Config.policy or config.schemes:
            warnings.warn(
                f"poseidon_hvd: {own_path}; Horovod's own optimizer is used, and policy and schemes are ignored.",
                stacklevel=2,
            )
        return _horovod_distributed_optimizer(
            optimizer,
            named_parameters,
            compression,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            0,
            groups,
            sparse_as_dense,
            process_set,
        )

    base = type(optimizer)
    wrapped_before = "_open_session" in base.__dict__
    if wrapped_before:  # start from the user's class
        optimizer._close_session()
        base = base.__mro__[1]
    attributes = {
        key: value for key, value in _DistributedOptimizer.__dict__.items() if key not in ("__dict__", "__weakref__")
    }
    wrapped_class = type(base.__name__, (base,), attributes)
    wrapped_class._distributed_class = wrapped_class  # for super(): a user may subclass it
    # Not through the user's __init__, which would lose what else it was given; and without step(), which a scheduler
    # may have bound to the instance.
    wrapped = wrapped_class.__new__(wrapped_class)
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    wrapped.param_groups = list(
        optimizer.param_groups
    )  # the same groups; one added to the wrapped optimizer later is not ours
    wrapped._wrapped_from = weakref.ref(optimizer)
    if not wrapped_before:
        _drop_state(wrapped)
    wrapped._setup(
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
        config,
    )
    return wrapped
