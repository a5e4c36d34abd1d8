"""Parameters that several trainers step while backward passes still need them: ``consistency`` of optimizers.

``LockedSteps`` lets a step wait for the passes; the decisions are those of ``protocol/step_gate.py``. ``SavedVersions``
keeps the values that passes have saved, and lets the step go on. The server runs functions of autograd contexts through
``ParameterGuard`` once an optimizer of this worker wants either.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import CoroutineType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from farprop._torch import version_of
from farprop.errors import RpcTimeoutError
from farprop.locks import make_lock, make_owned_lock
from farprop.protocol.step_gate import StepGate
from farprop.runtime import checkpoint_regions
from farprop.runtime.async_results import Deferred
from farprop.runtime.autograd import engine
from farprop.runtime.autograd.contexts import Context, ContextContainer, maker_of
from farprop.runtime.coroutine_steps import in_steps
from farprop.runtime.thread_pool import pool_of_this_thread

_ADMIT_SECONDS = 0.05  # a new context waits so long for a step that waits
_LOOK_SECONDS = 0.5  # a context may have ended without a word, if a thread was interrupted


class _Gate:
    """A ``StepGate`` with a clock and threads that wait. Users are numbers."""

    def __init__(self) -> None:
        self.state = StepGate()
        self._changed = threading.Condition(make_owned_lock("step_gate"))  # type: ignore[arg-type]
        self._numbers = itertools.count(1)

    def enter(self, user: int) -> None:
        """A user begins. Waits for a step that runs, and shortly for one that waits."""
        with self._changed:
            if self.state.on_use(user):
                return
        with _blocked(), self._changed:
            until = time.monotonic() + _ADMIT_SECONDS
            while not self.state.on_use(user):
                left = until - time.monotonic()
                if left <= 0 and self.state.admit(user):
                    break
                self._changed.wait(left if left > 0 else _LOOK_SECONDS)

    def leave(self, user: int) -> None:
        with self._changed:
            self.state.on_context_ended(user)
            if self.state.is_busy:
                self._changed.notify_all()

    def step(self, done: Collection[int], timeout: float | None) -> AbstractContextManager[None]:
        """Keep users out, as soon as there are none. Those in ``done`` are none any more.

        Raises:
            RpcTimeoutError: users did not end in time.
        """
        return self._step(done, timeout)

    @contextmanager
    def _step(self, done: Collection[int], timeout: float | None) -> Iterator[None]:
        number = next(self._numbers)
        try:
            with self._changed:
                self.state.on_step(number, done)
                self._changed.notify_all()  # other steps may have waited for these
                may_run = self._may_run(number)
            if not may_run:
                self._await(number, timeout)
            yield
        finally:
            with self._changed:
                self.state.on_step_ended(number)
                self._changed.notify_all()

    def _await(self, number: int, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with _blocked(), self._changed:
            while not self._may_run(number):
                left = _LOOK_SECONDS if deadline is None else min(deadline - time.monotonic(), _LOOK_SECONDS)
                if left <= 0:
                    raise RpcTimeoutError(self._too_long(timeout or 0.0))
                self._changed.wait(left)

    def _may_run(self, number: int) -> bool:
        return self.state.may_run(number)

    def _too_long(self, timeout: float) -> str:
        raise NotImplementedError


class LockedSteps(_Gate):
    """Steps that wait for passes: the users are contexts. Methods may be called from any thread."""

    def __init__(self, contexts: ContextContainer, name_of: Callable[[int], str]) -> None:
        super().__init__()
        self._contexts = contexts
        self._own_rank = maker_of(contexts.max_id)
        self._name_of = name_of
        self._own: set[int] = set()  # contexts of this worker that count, or have counted

    def leave(self, user: int) -> None:
        self._own.discard(user)
        super().leave(user)

    def step(self, done: Collection[int], timeout: float | None) -> AbstractContextManager[None]:
        self._own.update([each for each in done if maker_of(each) == self._own_rank])
        return super().step(done, timeout)

    def _may_run(self, number: int) -> bool:
        get = self._contexts.get
        for context_id in list(self.state.users):
            if get(context_id) is None:
                self.state.on_context_ended(context_id)
        for context in self._contexts.all():
            # Contexts that this worker has made may use its parameters without a call, until they step.
            if maker_of(context.id) == self._own_rank and context.id not in self._own:
                self._own.add(context.id)
                self.state.users.add(context.id)
        return super()._may_run(number)

    def _too_long(self, timeout: float) -> str:
        users = sorted(self.state.users)
        listed = ", ".join(f"context {each} of {self._name_of(maker_of(each))}" for each in users[:5])
        return (
            f"A step with consistency='locked' has waited {timeout:.1f} s for backward passes that may need the "
            f"parameters: {listed or 'other steps'}. It was not taken. Contexts count until they step or end: end "
            "those that don't train, or use consistency='versioned'."
        )


class SavedVersions(_Gate):
    """Keeps the values of parameters that graphs have saved, when a step changes them.

    The users are runs of functions and of torch's engine: a step waits for those that run, so that none reads a
    parameter that is half changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watching = make_lock("saved_versions")
        self._watched: dict[int, int] = {}  # the memory of parameters, by address: how many optimizers step them
        self._live: dict[int, weakref.WeakSet[_Saved]] = {}
        self._runs = itertools.count(1)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """This thread reads parameters: it runs a function or torch's engine."""
        number, outer = next(self._runs), _running.get()
        try:
            self.enter(number)
            _running.set((*outer, number))
            yield
        finally:
            _running.set(outer)
            self.leave(number)

    @contextmanager
    def run(self) -> Iterator[None]:
        """A function of a context runs, or a step of a coroutine."""
        with self.reading(), saved_tensors_hooks(self._pack, _unpack):
            yield

    def watch(self, parameters: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Watch over parameters; returns what ends it."""
        addresses = [parameter.untyped_storage().data_ptr() for parameter in parameters]
        with self._watching:
            for address in addresses:
                self._watched[address] = self._watched.get(address, 0) + 1
                self._live.setdefault(address, weakref.WeakSet())
        return partial(self._forget, addresses)

    def _forget(self, addresses: Iterable[int]) -> None:
        # A finaliser calls this, which takes no lock. If it comes amid ``watch``, the address may stay watched.
        for address in addresses:
            left = self._watched.get(address, 0) - 1
            if left > 0:
                self._watched[address] = left
            else:
                self._watched.pop(address, None)
                self._live.pop(address, None)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        # A tensor that requires grad refers to the node that saves it.
        saved = _Saved(tensor.detach() if tensor.requires_grad else tensor)
        if self._watched:
            live = self._live.get(_address(tensor))
            if live is not None:
                saved.is_parameter = True
                with self._watching:
                    live.add(saved)
        return saved

    @contextmanager
    def step_of(self, parameters: Iterable[torch.Tensor], timeout: float | None) -> Iterator[None]:
        """Change parameters. Graphs that have saved one get a copy of the values that it had."""
        # The function that steps runs itself, if it was called in a context.
        with self.step(_running.get(), timeout):
            for parameter in parameters:
                live = self._live.get(parameter.untyped_storage().data_ptr())
                if live:
                    copy = parameter.untyped_storage().clone()
                    for saved in list(live):
                        saved.move_to(copy)
                    live.clear()
            checkpoint_regions.versions += 1
            yield

    def _too_long(self, timeout: float) -> str:
        return (
            f"A step with consistency='versioned' has waited {timeout:.1f} s for {len(self.state.users)} functions and "
            "backward passes that run on this worker. It was not taken. If one of them waits for the step, take the "
            "step outside of it."
        )


# The runs of functions that this thread is in.
_running: ContextVar[tuple[int, ...]] = ContextVar("farprop_guarded_runs", default=())


class _Saved:
    """A tensor that a graph has saved."""

    __slots__ = ("__weakref__", "is_parameter", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.is_parameter = False
        self.version = None if tensor.is_inference() else version_of(tensor)

    def move_to(self, storage: torch.UntypedStorage) -> None:
        """Nobody reads it meanwhile."""
        old = self.tensor
        if version_of(old) == self.version:
            moved = torch.empty(0, dtype=old.dtype, device=old.device)
            self.tensor = moved.set_(storage, old.storage_offset(), old.size(), old.stride())
            self.version = version_of(self.tensor)


def _unpack(saved: _Saved) -> torch.Tensor:
    what = "a parameter that a step of another kind has changed" if saved.is_parameter else "a tensor"
    checkpoint_regions.check_version(saved.tensor, saved.version, what)
    return saved.tensor


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and tensor.is_cpu else 0


class ParameterGuard:
    """Runs functions of autograd contexts so that steps don't disturb their passes."""

    def __init__(self, contexts: ContextContainer, name_of: Callable[[int], str]) -> None:
        self.locked: LockedSteps | None = None
        self.versions: SavedVersions | None = None
        self._contexts = contexts
        self._name_of = name_of
        self.is_used = False

    def use_locks(self) -> LockedSteps:
        """An optimizer of this worker has ``consistency="locked"``. From now on all contexts count."""
        if self.locked is None:
            self.locked = LockedSteps(self._contexts, self._name_of)
            self._contexts.on_released = self.locked.leave
            self.is_used = True
        return self.locked

    def use_versions(self) -> SavedVersions:
        """An optimizer of this worker has ``consistency="versioned"``."""
        if self.versions is None:
            self.versions = SavedVersions()
            engine.reading = self.versions.reading
            self.is_used = True
        return self.versions

    def run(self, context: Context, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function of a context."""
        if self.locked is not None:
            self.locked.enter(context.id)
        mode: Callable[[], AbstractContextManager[None]] = nullcontext if self.versions is None else self.versions.run
        with mode():
            value = function(*args, **kwargs)
        if type(value) is CoroutineType:
            return in_steps(mode, value)
        if type(value) is Deferred:
            return value.wrapped(partial(self.run, context))
        return value


@contextmanager
def _blocked() -> Iterator[None]:
    """A thread of the pool that waits here leaves its place to another."""
    pool = pool_of_this_thread()
    if pool is None:
        yield
    else:
        with pool.blocked():
            yield
