"""Calls inside of ``torch.utils.checkpoint``: made once, and replayed when torch runs the region again.

Torch runs a checkpointed function a second time, when a backward pass needs what the first run did not keep. In the
first run each call is noted in the *region* with a copy of its result. In the second run the same calls get these
results, and nothing is sent: no function runs twice because of it on another worker, no reference is made twice, and
the pass that is under way sees no new messages. The callee runs a function that is called from a region as a region of
its own (``call_modes``), so each worker forgets and recomputes its own part, with its own random numbers.

Torch's reentrant kind runs a backward pass inside of a backward pass. A distributed pass has to stop at calls, which
that kind does not allow. So in an autograd context it is replaced by the other kind, which has the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch

from farprop._torch import CheckpointFunction, checkpoint, checkpoint_generator, tree_map, version_of
from farprop.errors import UsageError, renewed, without_frames
from farprop.runtime import agent_registry
from farprop.runtime.autograd.contexts import current_context

_T = TypeVar("_T")


class Outcome:
    """The outcome of one call: what the second run gets."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._value: Any = None
        self._error: Exception | None = None
        self._random: torch.Tensor | None = None
        self.pending: Any = None
        """The future of a call that has no outcome yet."""

    def keep(self, value: _T) -> _T:
        """Note the result of the call; returns it. The program may change it, so tensors are copied."""
        self._value = _mapped(value, torch.Tensor, _Kept)
        self.pending = None
        return value

    def fail(self, error: Exception) -> None:
        self._error = without_frames(renewed(error))  # type: ignore[assignment]
        self.pending = None

    def keep_random_state(self) -> None:
        """The call has returned. Functions that it led to may have drawn random numbers here, on other threads."""
        self._random = torch.get_rng_state()

    def replay(self) -> Any:
        """Return the result again, or raise the error."""
        if self.pending is not None:
            try:
                self.pending.wait()  # which notes the result
            except Exception as error:
                self.fail(error)
        if self._random is not None:
            torch.set_rng_state(self._random)
        if self._error is not None:
            raise renewed(self._error)
        return _mapped(self._value, _Kept, _Kept.replayed)

    def complete(self, future: Any) -> None:
        """Complete a future with the outcome."""
        try:
            future.set_result(self.replay())
        except Exception as error:
            future.set_exception(error)

    def kept_value(self, value_of: Callable[..., _T], *answer: Any) -> _T:
        """Decode an answer, and note what came out."""
        try:
            return self.keep(value_of(*answer))
        except Exception as error:
            self.fail(error)
            raise


class _Kept:
    """A tensor of a result."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._requires_grad = tensor.requires_grad
        self._tensor = tensor.detach().clone()

    def replayed(self) -> torch.Tensor:
        # Not a leaf of the graph, so that it may be changed in place, as in the first run.
        return self._tensor.detach().requires_grad_().clone() if self._requires_grad else self._tensor.clone()


def _mapped(tree: Any, kind: type[_T], make: Callable[[_T], Any]) -> Any:
    """A copy of a tree, with ``make(leaf)`` for leaves of this kind. A leaf that is there twice is made once: if one of
    them is changed in place, so is the other.
    """
    made: dict[int, Any] = {}

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, kind):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = make(leaf)
        return made[id(leaf)]

    return tree_map(one, tree)


class Region:
    """One run of a checkpointed function. ``outer`` is the region that it is in; the second run has ``outcomes``."""

    def __init__(self, outer: Region | None, outcomes: list[Outcome], is_first: bool, keeps_random_state: bool) -> None:
        self.outer = outer
        self.is_first = is_first
        self._outcomes = outcomes
        self.keeps_random_state = keeps_random_state
        self._next = 0

    def next_call(self, label: str) -> tuple[Outcome, bool]:
        """The outcome of the next call, and whether it is there already: then the call must not be made."""
        regions: list[Region] = []
        region: Region | None = self
        while region is not None:
            regions.append(region)
            region = region.outer
        outcome: Outcome | None = None
        for each in reversed(regions):  # the outermost that runs again has it
            if not each.is_first:
                outcome = each._replayed(label)
                break
        is_there = outcome is not None
        outcome = outcome or Outcome(label)
        for each in regions:
            if each.is_first:
                each._outcomes.append(outcome)
        return outcome, is_there

    def _replayed(self, label: str) -> Outcome:
        number = self._next
        self._next += 1
        known = self._outcomes[number].label if number < len(self._outcomes) else "no call"
        if known != label:
            raise UsageError(
                f"A function under torch.utils.checkpoint makes other calls when it runs again: {label}, where the "
                f"first run made {known}. It has to make the same calls in the same order: take what decides about "
                "them, such as a counter or a time, out of it."
            )
        return self._outcomes[number]

    def run(self, label: str, make: Callable[[], _T]) -> _T:
        """Make a call, or replay it."""
        outcome, is_there = self.next_call(label)
        if is_there:
            return outcome.replay()  # type: ignore[no-any-return]
        try:
            with making_a_call():
                return outcome.keep(make())
        except Exception as error:
            outcome.fail(error)
            raise
        finally:
            if self.keeps_random_state:
                outcome.keep_random_state()


# Whether this process has run a checkpointed function since it has workers to call. Until then calls don't look.
is_used = False
# How many steps with consistency="versioned" this process has taken.
versions = 0
# The region that this thread is in, or MAKING while it makes a call of the region's first run.
current_region: ContextVar[Region | None] = ContextVar("farprop_checkpoint_region", default=None)
MAKING = Region(None, [], is_first=True, keeps_random_state=False)


@contextmanager
def making_a_call() -> Iterator[None]:
    """Send a call of a region's first run."""
    region = current_region.get()
    current_region.set(MAKING)
    try:
        yield
    finally:
        current_region.set(region)


def region_here() -> Region | None:
    """The region whose calls this thread has to note or replay."""
    region = current_region.get()
    return None if region is MAKING else region


def run_outside(function: Callable[..., _T], *args: Any) -> _T:
    """Run a callback of a future, which the first run of a region has added. Perhaps the thread that completes the
    future runs it, where torch's checkpoint does not see what it saves. So it is never part of the region.
    """
    region = current_region.get()
    current_region.set(None)
    try:
        with torch.autograd.graph.saved_tensors_hooks(_with_version, _unchanged):
            return function(*args)
    finally:
        current_region.set(region)


def _with_version(saved: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    return saved, None if saved.is_inference() else version_of(saved)


def _unchanged(packed: tuple[torch.Tensor, int | None]) -> torch.Tensor:
    check_version(*packed, "a tensor that a callback of a future has used")
    return packed[0]


def check_version(saved: torch.Tensor, version: int | None, what: str) -> None:
    """Raise torch's error if a tensor was changed after a graph had saved it. With hooks torch does not check this."""
    if version is not None and version_of(saved) != version:
        raise RuntimeError(
            f"{what}, [{saved.type()} {list(saved.shape)}], which the backward pass needs, has been modified by an "
            f"inplace operation: it is at version {version_of(saved)}; expected version {version}."
        )


def run_as_region(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a called function as a region of this worker. It may change its arguments: the second run gets them again."""
    # As one argument: torch would unpack a tensor that is there twice as two.
    return checkpoint(_run_on_copies, (function, args, kwargs), use_reentrant=False)


def _run_on_copies(call: tuple[Callable[..., Any], Any, dict[str, Any]]) -> Any:
    function, args, kwargs = call
    copies, named = _mapped((args, kwargs), torch.Tensor, torch.clone)
    return function(*copies, **named)


# What farprop puts in the place of torch's functions


def _generator(function: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any) -> Generator[None]:
    """Torch's generator: the caller runs the function for the first time where it yields."""
    global is_used
    assert checkpoint_generator is not None
    theirs = checkpoint_generator.theirs
    if agent_registry.installed is None or not torch.is_grad_enabled():
        yield from theirs(function, preserve_rng_state, *args, **kwargs)
        return
    is_used = True
    outcomes: list[Outcome] = []
    again = partial(_run_again, function, outcomes, versions, preserve_rng_state)
    inner = theirs(again, preserve_rng_state, *args, **kwargs)
    next(inner)
    outer = current_region.get()
    try:
        current_region.set(Region(outer, outcomes, is_first=True, keeps_random_state=preserve_rng_state))
        yield
    except BaseException as error:
        current_region.set(outer)
        inner.throw(error)
        raise
    finally:
        current_region.set(outer)
    yield from inner


def _run_again(
    function: Any, outcomes: list[Outcome], version: int, preserve_rng_state: bool, *args: Any, **kwargs: Any
) -> Any:
    if version != versions:
        raise UsageError(
            "A function under torch.utils.checkpoint has to run again, and a step has changed parameters of this "
            "worker since it ran. With consistency='versioned' their earlier values are kept for graphs, not for "
            "functions. Use consistency='locked'."
        )
    outer = current_region.get()
    region = Region(outer, outcomes, is_first=False, keeps_random_state=preserve_rng_state)
    current_region.set(region)
    try:
        return function(*args, **kwargs)
    finally:
        current_region.set(outer)


def _noting_calls(function: Any, preserve_rng_state: bool) -> Callable[..., Any]:
    """The function for torch's own reentrant kind, which runs it once without a graph, and again in each pass."""
    outcomes: list[Outcome] = []
    again = partial(_run_again, function, outcomes, versions, preserve_rng_state)
    is_first = True

    def run(*args: Any) -> Any:
        global is_used
        nonlocal is_first
        if not is_first:
            return again(*args)
        is_first, is_used = False, True
        outer = current_region.get()
        current_region.set(Region(outer, outcomes, is_first=True, keeps_random_state=preserve_rng_state))
        try:
            return function(*args)
        finally:
            current_region.set(outer)

    return run


def _apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """The reentrant kind."""
    runs_again = torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    if current_context.get() is None:
        if runs_again and agent_registry.installed is not None:
            function = _noting_calls(function, preserve_rng_state)
        return _their_apply(function, preserve_rng_state, *args)
    if not runs_again:
        # As there: no gradient comes out of it, not even for parameters.
        with torch.no_grad():
            return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


if checkpoint_generator is not None and CheckpointFunction is not None:
    setattr(checkpoint_generator.owner, checkpoint_generator.name, _generator)
    _their_apply = CheckpointFunction.apply
    CheckpointFunction.apply = staticmethod(_apply)
