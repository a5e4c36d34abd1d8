"""Autograd across workers: a drop-in for ``torch.distributed.autograd``.

::

    import farprop.autograd as dist_autograd
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.add, args=(a, b)).sum()
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from types import FrameType, TracebackType

import torch

from farprop.autograd.drawing import Drawing
from farprop.autograd.higher_order import grad, hvp, jvp
from farprop.errors import UsageError
from farprop.rpc.options import checked_timeout
from farprop.runtime import agent_registry
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.autograd.contexts import Context as DistAutogradContext
from farprop.runtime.autograd.contexts import current_context
from farprop.runtime.autograd.driver import BackwardDriver
from farprop.runtime.dynamo_disable import uncompiled
from farprop.runtime.thread_pool import check_may_block, this_thread

__all__ = [
    "DistAutogradContext",
    "backward",
    "context",
    "detect_anomaly",
    "draw",
    "get_gradients",
    "get_mode",
    "grad",
    "hvp",
    "is_available",
    "jvp",
    "set_mode",
]

_MODES = ("smart", "fast")


def __dir__() -> list[str]:
    return __all__


class context:  # noqa: N801
    """Records the calls of a forward pass for :func:`backward`: ``with context() as context_id:``.

    In a coroutine ``async with`` does the same. The context belongs to the task, and to the tasks that it starts
    inside. At its end every worker releases the graphs and gradients of the context.

    Raises:
        UsageError: This thread is in a context already.
    """

    autograd_context: DistAutogradContext | None = None
    _has_ended = False

    @uncompiled
    def __enter__(self) -> int:
        before = self.autograd_context
        try:
            return _new_context(self)._context_id()
        except BaseException:
            if self.autograd_context is not before:
                self._end()
            raise

    @uncompiled
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self.autograd_context is not None
        try:
            _release_context(self.autograd_context._context_id())
            self._has_ended = True
        except BaseException:
            self._end()
            raise

    async def __aenter__(self) -> int:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)  # which waits for nothing

    def _end(self) -> None:
        """End an interrupted context. Takes no lock: a finaliser calls it, too."""
        ended = self.autograd_context
        if ended is not None:
            if current_context.get() is ended:
                current_context.set(None)
            agent = agent_registry.installed
            if agent is not None:
                agent.context_cleanup.release_soon(ended.id)

    def __del__(self) -> None:
        # An interrupt may have come before the first line of ``__exit__``.
        if not self._has_ended:
            self._end()


@uncompiled
def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    *,
    create_graph: bool = False,
    mode: str | None = None,
    timeout: float | None = None,
) -> None:
    """Run the backward pass from ``roots`` through every worker that took part in the forward pass.

    The gradient of a leaf is accumulated in the context, on the worker that has the leaf. ``.grad`` is not touched.
    After an error the context has the gradients that it had before the pass.

    Args:
        context_id: The id that ``context()`` returned.
        roots: Scalars, each the result of a computation that requires grad.
        retain_graph: Whether to keep the graphs of all workers for another pass.
        create_graph: Whether to record the pass itself, on all workers, so that the gradients can be differentiated.
            It keeps the graphs, too.
        mode: ``"smart"`` or ``"fast"``. By default the mode of :func:`set_mode`. In FAST mode the pass waits until its
            timeout if the result of any call was not used.
        timeout: The seconds that the pass may take; 0 disables the timeout. By default the timeout of calls.

    Raises:
        TypeError: ``context_id`` is not an int, or ``roots`` is not a list or tuple.
        UsageError: There is no such context, or a root has no graph.
        BackwardError: A backward function or hook raised on another worker.
        ConnectionLostError: A worker is gone.
        RpcTimeoutError: The pass took longer than its timeout.
        Exception: What a backward function or hook raised in this worker's own graph.

    Example:
        ``dist_autograd.backward(context_id, [loss])``
    """
    if type(context_id) is not int or not isinstance(roots, list | tuple):
        raise TypeError(
            "backward(): incompatible function arguments: it takes a context id, which is an int, and a list of "
            f"tensors, but got {type(context_id).__name__} and {type(roots).__name__}."
        )
    agent = agent_registry.installed
    if agent is None:
        agent = current_agent()  # raises
    if hasattr(this_thread, "runs_coroutines_of"):
        check_may_block("backward")
    seconds = agent.services.rpc_timeout if timeout is None else checked_timeout(timeout)
    fast = (agent.autograd_mode if mode is None else _checked_mode(mode)) == "fast"
    agent.gradients.backward(context_id, roots, retain_graph, fast, seconds, create_graph)


class detect_anomaly(torch.autograd.detect_anomaly):  # noqa: N801
    """Finds the node that fails or returns NaN: ``with detect_anomaly():`` around a forward and a backward pass.

    The error of ``backward`` then shows the line of the forward pass that created the node, on the worker where it ran,
    and the calls that led there. It is slow. Torch's own ``detect_anomaly`` has the same effect.

    Args:
        check_nan: Whether NaN in a gradient is an error.
    """


@uncompiled
def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Get the gradients of this worker's leaves.

    Args:
        context_id: The id of the context.

    Returns:
        The gradients by leaf.

    Raises:
        UsageError: This worker does not have the context.
    """
    found = _driver().contexts.find(context_id)
    with found.lock:
        return dict(found.gradients)


def set_mode(mode: str) -> None:
    """Set the mode of this worker's backward passes that give none.

    It is initially that of ``FARPROP_AUTOGRAD_MODE``, or SMART.

    Args:
        mode: ``"smart"`` or ``"fast"``.

    Raises:
        UsageError: There is no such mode.
    """
    current_agent().autograd_mode = _checked_mode(mode)


def get_mode() -> str:
    """Get the mode of this worker's backward passes that give none.

    Returns:
        ``"smart"`` or ``"fast"``.
    """
    return current_agent().autograd_mode


def _checked_mode(mode: str) -> str:
    if mode not in _MODES:
        raise UsageError(f"There is no mode {mode!r} of backward passes. Use 'smart' or 'fast'.")
    return mode


def _driver() -> BackwardDriver:
    return current_agent().gradients


# Torch's private names


def _new_context(manager: context | None = None) -> DistAutogradContext:
    """Make a new context and make it current in this thread. ``manager`` gets it, too, if there is one."""
    found = current_context.get()
    # A released one belonged to the task that started this one, and has ended since.
    if found is not None and not found.is_released and not _was_interrupted(found):
        raise UsageError("Already have an autograd context id for this thread. Contexts can't be nested.")
    watch = None if manager is None else weakref.ref(manager)
    made = _driver().contexts.new()
    # An interrupt can't come before the manager has it: nothing is called here.
    made.manager = watch
    if manager is not None:
        manager.autograd_context = made
    current_context.set(made)
    return made


def _was_interrupted(found: DistAutogradContext) -> bool:
    """Whether an interrupt came before the first line of ``__exit__``, so that the context is still current."""
    if found.manager is None:
        return False
    manager = found.manager()
    if manager is None:
        return True
    # The traceback of the interrupt may still hold the frame of ``__exit__``, and so the manager.
    holders = gc.get_referrers(manager)
    return any(isinstance(holder, FrameType) and holder.f_code is context.__exit__.__code__ for holder in holders)


def _current_context() -> DistAutogradContext:
    """The context of this thread."""
    found = current_context.get()
    if found is None:
        raise UsageError("Current thread doesn't have a valid autograd context. Use 'with context():'.")
    return found


def _is_valid_context(context_id: int) -> None:
    """Raise ``UsageError`` if this worker does not have a context with this id."""
    _driver().contexts.find(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """The context with this id; raises ``UsageError`` if this worker does not have it."""
    return _driver().contexts.find(context_id)


def _release_context(context_id: int) -> None:
    """Release a context on every worker that has it."""
    found = current_context.get()
    if found is not None and found._context_id() == context_id:
        current_context.set(None)
    current_agent().context_cleanup.release(context_id)


def _init(worker_id: int) -> None:
    """Do nothing. Torch's backends call it for a new worker; here ``init_rpc`` does everything."""


def _get_max_id() -> int:
    """The largest id that a context of this worker can have."""
    return _driver().contexts.max_id


def _get_debug_info() -> dict[str, int]:
    """Counts of passes and contexts."""
    return _driver().debug_info()


def is_available() -> bool:
    """Whether distributed autograd is available. Always true, unlike in some builds of torch.

    Returns:
        True.
    """
    return True


def draw(context_id: int, timeout: float = 1.0) -> Drawing:
    """Draw the graph of a context: a box for each worker, an arrow for the messages from one to another.

    Local graphs are folded to their size: the nodes and leaves behind the tensors that a worker has sent.

    Args:
        context_id: The context.
        timeout: The seconds to wait for the other workers. One that does not answer is drawn with the reason.

    Returns:
        The drawing: ``svg``, ``mermaid`` and ``dot`` are its text, and a notebook shows it.

    Raises:
        UsageError: There is no such context on this worker.

    Example:
        ``dist_autograd.draw(context_id).save("graph.svg")``
    """
    return Drawing(context_id, current_agent().inspector.graphs(context_id, timeout))
