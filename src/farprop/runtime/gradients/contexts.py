"""Autograd contexts: what one worker knows of a forward pass and its gradients."""

from __future__ import annotations

import itertools
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from farprop.errors import ProtocolError, UsageError
from farprop.protocol.passes import ROOTS, PassId, Target
from farprop.runtime.gradients import anomaly
from farprop.runtime.gradients.graph import Edge, Plan, Reach, check_context, reach_from
from farprop.runtime.gradients.hooks import hooks_of
from farprop.runtime.gradients.nodes import LEAF_TYPE, SendRpcBackward, is_recorded, make_receive
from farprop.wire.codec import Encoded, decode_collecting
from farprop.wire.frames import CONTEXT

if TYPE_CHECKING:
    from farprop.runtime.gradients.local import LocalPass

_R = TypeVar("_R")
# context, pair (0: no tensor requires grad), number of tensors that do, length of the trail of an anomaly mode
_HEAD = struct.Struct("<QQII")
COUNTER_BITS = 48
_REMEMBERED = 10_000

current_context: ContextVar[Context | None] = ContextVar("farprop_autograd_context", default=None)


class Head(NamedTuple):
    """What stands in front of the pickle of a message of a context."""

    context_id: int
    pair: int
    tensors: int
    trail: str


def take_head(frame: Any) -> Head:
    """Take it off the frame."""
    meta = frame.meta
    if len(meta) < _HEAD.size:
        raise ProtocolError("a message of an autograd context is too short")
    context_id, pair, tensors, length = _HEAD.unpack_from(meta)
    end = _HEAD.size + length
    if end > len(meta):
        raise ProtocolError("a message of an autograd context is shorter than its trail")
    trail = bytes(meta[_HEAD.size : end]).decode(errors="replace") if length else ""
    frame.meta = memoryview(meta)[end:]
    return Head(context_id, pair, tensors, trail)


class Context:
    """One autograd context on one worker. Methods may be called from any thread."""

    def __init__(self, context_id: int, me: int, new_pair: Callable[[], int]) -> None:
        self.id = context_id
        self.me = me
        self.sends: dict[int, SendRpcBackward] = {}
        self.receives: dict[int, Any] = {}
        self.known: set[int] = set()  # workers that clean-up has to go to
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.passes: dict[PassId, LocalPass] = {}
        self.aborted: set[PassId] = set()
        self.lock = threading.Lock()
        self.is_released = False
        self.trails: dict[int, str] = {}  # of sends, in anomaly mode: the calls that led to them
        self._new_pair = new_pair
        self._newest: SendRpcBackward | None = None  # unless it was looked at
        self._reaches: dict[int, Reach] = {}
        self._plan: tuple[int, tuple[Edge, ...], Plan] | None = None

    # Messages

    def send(
        self,
        to: int,
        encode: Callable[[list[torch.Tensor] | None], Encoded],
        answers: str = "",
        placed: bool = False,
    ) -> Encoded:
        """A message of this context: ``encode`` fills the list it gets with the tensors that require grad.

        ``answers`` is the trail of the call that this is the answer to, in anomaly mode. ``placed`` if tensors change
        devices on the way.
        """
        if to != self.me:
            self.known.add(to)
        tensors: list[torch.Tensor] = []
        encoded = encode(tensors if torch.is_grad_enabled() else None)
        pair = 0
        if tensors:
            pair = self._new_pair()
            self.sends[pair] = self._newest = SendRpcBackward(tensors, placed)
        trail = b""
        if answers:
            self.trails[pair] = answers
        elif anomaly.is_enabled():
            if pair:
                self.trails[pair] = anomaly.current_trail.get()
            trail = anomaly.trail_from_here(f"worker {self.me}").encode()
        meta = _HEAD.pack(self.id, pair, len(tensors), len(trail)) + trail + encoded.meta
        return Encoded(meta, encoded.buffers, encoded.keep, encoded.flags | CONTEXT, encoded.travellers)

    def receive(self, sender: int, head: Head, decoder: Callable[..., _R], *args: Any) -> _R:
        """Decode a message of this context; its tensors that require grad become outputs of a receive."""
        if sender != self.me:
            self.known.add(sender)
        if not head.pair or self.is_released:
            return decoder(*args)
        value, tensors = decode_collecting(decoder, *args)
        if len(tensors) != head.tensors:
            raise ProtocolError(f"a message should have {head.tensors} tensors that require grad, not {len(tensors)}")
        node = make_receive(tensors, self.id, Target(sender, head.pair))
        if node is not None:
            self.receives[head.pair] = node
        return value

    # The graph

    def look_at_leaves(self) -> None:
        """While a call is under way: find what a backward pass will ask for, if leaves were sent."""
        send, self._newest = self._newest, None
        if send is not None and is_recorded():
            for node, _ in send.next_functions:
                if type(node) is LEAF_TYPE:
                    hooks_of(node)

    def plan(self, roots: tuple[Edge, ...], again: bool) -> Plan:
        """How the sends and these roots share the graph. Made once for each, if nothing that matters can change."""
        known = self._plan
        if known is not None and known[0] == len(self.sends) and known[1] == roots:
            return known[2]
        sources = {pair: self._reach_of(pair) for pair in list(self.sends)}
        if roots:
            sources[ROOTS] = reach_from(roots)
        for reach in sources.values():
            check_context(reach, self.id)
        plan = Plan(sources)
        # The roots' graph lives as long as the plan, so it is kept only if another pass may come.
        if plan.is_constant and (again or not roots):
            self._plan = len(plan.sources) - bool(roots), roots, plan
        return plan

    def _reach_of(self, pair: int) -> Reach:
        """What a send leads to; found once."""
        reach = self._reaches.get(pair)
        if reach is None:
            reach = self._reaches[pair] = reach_from(self.sends[pair].next_functions)
        return reach

    # Under torch's names, for people and tests

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Any]:
        return dict(self.sends)

    def _recv_functions(self) -> dict[int, Any]:
        return dict(self.receives)

    def _known_worker_ids(self) -> set[int]:
        return set(self.known)

    def __repr__(self) -> str:
        return (
            f"<autograd context {self.id} of worker {self.id >> COUNTER_BITS}: {len(self.sends)} sends, "
            f"{len(self.receives)} receives, {len(self.gradients)} gradients>"
        )


class Contexts:
    """All contexts of a worker."""

    def __init__(self, me: int, numbers: Iterator[int] | None = None) -> None:
        """``numbers`` are those of ids; without them, they are counted."""
        self._me = me
        self._base = me << COUNTER_BITS
        self._lock = threading.Lock()
        self._contexts: dict[int, Context] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()  # so that a late message does not bring one back
        self._context_numbers = itertools.count(1) if numbers is None else numbers
        self._pair_numbers = itertools.count(1) if numbers is None else numbers

    @property
    def max_id(self) -> int:
        return self._base + (1 << COUNTER_BITS) - 1

    def new_pair(self) -> int:
        return self._base + next(self._pair_numbers)

    def new(self) -> Context:
        context = Context(self._base + next(self._context_numbers), self._me, self.new_pair)
        self._contexts[context.id] = context
        return context

    def find(self, context_id: int) -> Context:
        context = self._contexts.get(context_id)
        if context is None:
            ended = " It has ended." if context_id in self._ended else ""
            raise UsageError(f"Could not find autograd context with id: {context_id}.{ended}")
        return context

    def meet(self, context_id: int) -> Context | None:
        """The context of a message that came; made if this worker has not heard of it, None if it has ended."""
        context = self._contexts.get(context_id)
        if context is None:
            with self._lock:
                context = self._contexts.get(context_id)
                # One of ours that is not there has ended, however long ago that was.
                if context is None and context_id not in self._ended and context_id >> COUNTER_BITS != self._me:
                    context = self._contexts[context_id] = Context(context_id, self._me, self.new_pair)
        return context

    def release(self, context_id: int) -> Context | None:
        """Forget a context; returns it if there was one."""
        with self._lock:
            context = self._contexts.pop(context_id, None)
            self._ended[context_id] = None
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        if context is not None:
            context.is_released = True
        return context

    def all(self) -> list[Context]:
        return list(self._contexts.values())

    def __len__(self) -> int:
        return len(self._contexts)
