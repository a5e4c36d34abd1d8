"""Autograd across workers: a drop-in for ``torch.distributed.autograd``.

::

    import farprop.autograd as dist_autograd
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.add, args=(a, b)).sum()
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from farprop.autograd.modes import get_mode, set_mode
from farprop.autograd.modes import is_fast as _is_fast
from farprop.errors import UsageError
from farprop.rpc.options import checked_timeout
from farprop.runtime.current import current_agent
from farprop.runtime.gradients.contexts import Context as DistAutogradContext
from farprop.runtime.gradients.contexts import current_context
from farprop.runtime.gradients.roots import backward_from
from farprop.runtime.gradients.space import GradientSpace
from farprop.runtime.uncompiled import uncompiled

__all__ = [
    "DistAutogradContext",
    "backward",
    "context",
    "detect_anomaly",
    "get_gradients",
    "get_mode",
    "is_available",
    "set_mode",
]


class context:  # noqa: N801
    """``with context() as context_id:`` records the calls of a forward pass, for :func:`backward`.

    Everything that the context holds, here and on other workers, is let go of at its end.
    """

    @uncompiled
    def __enter__(self) -> int:
        self.autograd_context = _new_context()
        return self.autograd_context._context_id()

    @uncompiled
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _release_context(self.autograd_context._context_id())


@uncompiled
def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    *,
    mode: str | None = None,
    timeout: float | None = None,
) -> None:
    """Run the backward pass from ``roots`` through every worker that the forward pass touched.

    Gradients of leaves are added up in the context, on the worker where the leaf is; ``.grad`` is left alone.

    Args:
        context_id: what ``context()`` gave.
        roots: scalars, each the result of a computation that requires grad.
        retain_graph: keep the graphs, here and elsewhere, for another pass.
        mode: ``"smart"`` (default) or ``"fast"``; unset, that of :func:`set_mode`. FAST waits for ever if the result of
            any call was not used.
        timeout: seconds that the pass may take; 0 for no limit. Unset, the timeout of calls holds.

    Raises what a backward function raised here; ``BackwardError`` for one on another worker; ``ConnectionLostError``
    when a worker is gone; ``RpcTimeoutError``. After an error the context has the gradients that it had before.
    """
    if type(context_id) is not int or not isinstance(roots, list | tuple):
        raise TypeError(
            "backward(): incompatible function arguments: it takes a context id, which is an int, and a list of "
            f"tensors, but got {type(context_id).__name__} and {type(roots).__name__}."
        )
    agent = current_agent()
    seconds = agent.rpc_timeout if timeout is None else checked_timeout(timeout)
    backward_from(agent.gradients, context_id, roots, retain_graph, _is_fast(mode), seconds)


class detect_anomaly(torch.autograd.detect_anomaly):  # noqa: N801
    """``with detect_anomaly():`` around a forward and a backward pass finds the node that fails or gives NaN.

    The error of ``backward`` then shows the line of the forward pass that the node is of, on the worker where it ran,
    and the calls that led there. It is slow. Torch's own ``detect_anomaly`` does the same here.
    """


@uncompiled
def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that the context has for leaves of this worker, by leaf."""
    found = _space().contexts.find(context_id)
    with found.lock:
        return dict(found.gradients)


def _space() -> GradientSpace:
    return current_agent().gradients


# Under torch's names


def _new_context() -> DistAutogradContext:
    """A new context, current for this thread."""
    if current_context.get() is not None:
        raise UsageError("Already have an autograd context id for this thread. Contexts can't be nested.")
    made = _space().contexts.new()
    current_context.set(made)
    return made


def _current_context() -> DistAutogradContext:
    """The context of this thread."""
    found = current_context.get()
    if found is None:
        raise UsageError("Current thread doesn't have a valid autograd context. Use 'with context():'.")
    return found


def _is_valid_context(context_id: int) -> None:
    """Raises if this worker does not have a context with this id."""
    _space().contexts.find(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """The context with this id, if this worker has it."""
    return _space().contexts.find(context_id)


def _release_context(context_id: int) -> None:
    """End a context, here and on every worker that knows it."""
    found = current_context.get()
    if found is not None and found._context_id() == context_id:
        current_context.set(None)
    _space().release(context_id)


def _init(worker_id: int) -> None:
    """Torch's backends call it for a new worker. Here ``init_rpc`` does all that there is to do."""


def _get_max_id() -> int:
    """The largest id that a context of this worker can have."""
    return _space().contexts.max_id


def _get_debug_info() -> dict[str, int]:
    """Counts of passes and contexts."""
    return _space().debug_info()


def is_available() -> bool:
    """Torch's builds may lack its own; this one is always there."""
    return True
