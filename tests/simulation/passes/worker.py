"""A worker: a small runtime around the state machines under test, modelled on ``farprop.runtime.autograd.driver``.

The worker that notices a failure stops the pass. Workers undo it only when the origin tells them: only the origin knows
whether it had ended before. If the origin is dead, an unfinished pass is undone.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

from farprop.protocol.backward import (
    ALONE,
    NONE,
    ROOTS,
    Announcer,
    CreditShare,
    GiveBack,
    PassAction,
    PassId,
    Release,
    Run,
    Send,
)
from farprop.protocol.needed_sends import pack_reached, unpack_needed
from farprop.wire.message import Bundle, GradientPart, PassHead
from tests.simulation.passes import checks
from tests.simulation.passes.context import ContextHolder
from tests.simulation.passes.local_pass import LocalPass, UnsharedRun
from tests.simulation.passes.network import Call
from tests.simulation.passes.origin import Origin
from tests.simulation.passes.threads import Future, PassError, Steps, start

if TYPE_CHECKING:
    from tests.simulation.passes.world import World

# The template of a message head; the fields that matter are set for each message.
_HEAD = PassHead(*[False] * len(PassHead._fields))._replace(context_id=7, bundle=None)


class Worker(ContextHolder):
    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world, rank)
        self.origins: dict[PassId, Origin] = {}
        self.numbers = itertools.count(1)

    # Performing actions

    def perform(
        self,
        local: LocalPass,
        actions: list[PassAction],
        back_to: int = -1,
        waits: bool = False,
        announcer: Announcer | None = None,
    ) -> Steps:
        """Perform actions; returns the messages to worker ``back_to``. ``waits``: the thread may wait for an answer."""
        back: list[tuple[bytes, int | None]] = []
        sends: deque[Send] = deque()
        todo = deque(actions)
        while (todo or sends) and not self.is_over(local):
            if self.world.rng.random() < 0.2:
                yield self.world.network.delay()  # other threads run in between
                continue
            if not todo:
                worker = sends[0].target.worker
                call = self._send(local, self._bundled(sends), announcer)
                if waits and not sends:
                    todo.extend(self._take_answer(local, worker, (yield call)))
                else:
                    call.then(
                        lambda answer, error, worker=worker: (
                            start(self, self._answered(local, worker, answer, error)) and None
                        )
                    )
                continue
            action = todo.popleft()
            if isinstance(action, Run):
                todo.extend((yield from self._execute(local, action)))
            elif isinstance(action, Send):
                if action.target.worker not in (back_to, self.rank):
                    sends.append(action)
                    continue
                checks.sends(local, action)
                if action.target.worker == back_to:
                    recorded = local.record_send([action.target])
                    back.append((self.head(local, action.target.message_id, action.share), recorded))
                else:
                    if local.history.recorded:
                        local.arrived[action.target.message_id] = local.made[action.target]
                    todo.extend(local.on_gradient(action.target.message_id, action.share))
            elif isinstance(action, GiveBack):
                head = self.head(local, 0, action.share)
                if back_to == local.id.origin:
                    back.append((head, None))
                elif not local.keep(action.share):
                    self.tell(local, local.id.origin, "give_back", head)
            elif isinstance(action, Release):
                if action.worker == self.rank:
                    todo.extend(local.on_release(action.used, action.share))
                else:
                    local.partners.add(action.worker)
                    head = self.head(local, 0, action.share)
                    self.tell(local, action.worker, "release_sources", head, tuple(sorted(action.used)))
            elif local.id in self.origins:
                self.origins[local.id].tell(action)
        return back

    def is_over(self, local: LocalPass) -> bool:
        """Actions decided before a failure are not performed after it."""
        return local.machine.failed

    def on_gradient(
        self, local: LocalPass, source: int, share: CreditShare, back_to: int = -1, waits: bool = False
    ) -> Steps:
        """The roots are ready, or gradients arrived from another worker."""
        unshared = local.start_unshared(source, share)
        if unshared is None:
            actions = local.start() if source == ROOTS else local.on_gradient(source, share)
        else:
            actions = yield from self._execute(local, unshared)
        return (yield from self.perform(local, actions, back_to, waits))

    def _execute(self, local: LocalPass, unshared_or_run: UnsharedRun | Run) -> Steps:
        unshared = unshared_or_run if isinstance(unshared_or_run, UnsharedRun) else None
        run = unshared_or_run if isinstance(unshared_or_run, Run) else unshared_or_run.run
        self.world.trace("%d runs units %s of %s after source %s", self.rank, run.units, local.history, run.source)
        local.begin(run)
        yield from self._work(local)
        return local.end(run) if unshared is None else local.end_unshared(unshared)

    def _work(self, local: LocalPass) -> Steps:
        rng, faults = self.world.rng, self.world.faults
        yield self.world.network.delay()
        if rng.random() < faults.failing:
            self.world.counts["failing units"] += 1
            self.world.trace("%d: it raises", self.rank)
            local.history.faulty = True
            raise PassError("a unit failed")

    def head(self, local: LocalPass, message_id: int, share: CreditShare, bundle: Bundle | None = None) -> bytes:
        passes = self.context.passes if self.context is not None else {}
        mine = [number for origin, number in passes if origin == self.rank]
        oldest = min(mine, default=0) if local.id.origin == self.rank else 0
        head = _HEAD._replace(
            message_id=message_id,
            pass_id=local.id,
            oldest=oldest,
            fast=local.history.fast,
            share=share,
            bundle=bundle,
        )
        return head.pack()

    # Outgoing messages

    def call(self, local: LocalPass, worker: int, method: str, *arguments: Any) -> Future:
        local.history.messages[method] += 1
        return self.world.network.call(self.rank, worker, method, *arguments)

    def _bundled(self, sends: deque[Send]) -> list[Send]:
        """The sends to the first one's worker, or some of them: large gradients travel alone."""
        bundle, rest = [sends[0]], []
        for send in list(sends)[1:]:
            fits = send.target.worker == bundle[0].target.worker and self.world.rng.random() < self.world.bundled
            (bundle if fits else rest).append(send)
        sends.clear()
        sends.extend(rest)
        return bundle

    def _send(self, local: LocalPass, sends: list[Send], announcer: Announcer | None) -> Future:
        for send in sends:
            checks.sends(local, send)
        worker = sends[0].target.worker
        local.partners.add(worker)
        series = ALONE if announcer is None else announcer.next(worker)
        if len(sends) == 1 and series is ALONE:
            head = self.head(local, sends[0].target.message_id, sends[0].share)
        else:
            self.world.counts["bundles" if len(sends) > 1 else "messages of a series"] += 1
            parts = [GradientPart(send.target.message_id, send.share, 0) for send in sends]
            head = self.head(local, 0, CreditShare(NONE, {}), Bundle(parts, series))
        recorded = local.record_send([send.target for send in sends])
        call = self.call(local, worker, "propagate", self.rank, head, recorded)
        rng = self.world.rng
        if rng.random() < self.world.faults.timeouts:
            self.world.clock.after(rng.uniform(0.0, 0.1), self._time_out, call)
        return call

    def _time_out(self, call: Future) -> None:
        if not call.is_done and not self.crashed:
            self.world.fault("timeouts")
            call.done(None, PassError("timeout"))

    def tell(self, local: LocalPass, worker: int, method: str, *arguments: Any) -> None:
        def check(_: Any, error: PassError | None) -> None:
            if error is not None:
                start(self, self.fail(local, error))

        self.call(local, worker, method, *arguments).then(check)

    def _take_answer(self, local: LocalPass, worker: int, back: list[tuple[bytes, int | None]]) -> list[PassAction]:
        """What an answer brings: gradients, with the id of their recorded message (0 for none), or None for credit."""
        actions: list[PassAction] = []
        for data, recorded in back:
            head = PassHead.parse(data)
            if recorded is None:
                actions += local.on_credit(head.share)
                continue
            local.record_arrival((head.message_id,), worker, recorded)
            actions += local.on_gradient(head.message_id, head.share)
        return actions

    def _answered(
        self, local: LocalPass, worker: int, back: list[tuple[bytes, int | None]], error: PassError | None
    ) -> Steps:
        try:
            if error is not None:
                raise error
            yield from self.perform(local, self._take_answer(local, worker, back))
        except PassError as raised:
            yield from self.fail(local, raised)

    # Incoming messages

    def serve(self, call: Call) -> Future:
        return start(self, getattr(self, "on_" + call.method)(*call.arguments))

    def _local(self, head: PassHead) -> LocalPass:
        context = self.find()
        local = context.passes.get(head.pass_id)
        if local is not None:
            return local
        if head.pass_id in context.aborted or head.pass_id.origin == self.rank:
            raise PassError("the pass has ended with an error")
        for old in [i for i in context.passes if i.origin == head.pass_id.origin and i.number < head.oldest]:
            del context.passes[old]
        local = context.passes[head.pass_id] = LocalPass(
            self.world, self.world.history(head.pass_id), self.rank, context.graph
        )
        return local

    def on_propagate(self, sender: int, data: bytes, recorded: int) -> Steps:
        head = PassHead.parse(data)
        local = self._local(head)
        local.partners.add(sender)
        parts = [head.message_id] if head.bundle is None else [part.message_id for part in head.bundle.parts]
        local.record_arrival(parts, sender, recorded)
        try:
            if head.bundle is not None:
                return (yield from self._on_bundle(local, head.bundle, sender))
            return (yield from self.on_gradient(local, head.message_id, head.share, back_to=sender))
        except PassError:
            local.fail()
            raise

    def _on_bundle(self, local: LocalPass, bundle: Bundle, sender: int) -> Steps:
        parts, series = bundle
        local.on_message(series)
        back = []
        together = local.start_together(parts, sender)
        if together is not None:
            actions: list[PassAction] = []
            for unshared in together:
                local.begin(unshared.run)
            yield from self._work(local)
            for unshared in together:
                actions += local.end_unshared(unshared)
            back += yield from self.perform(local, actions, sender)
        else:
            started = [local.start_unshared(part.message_id, part.share) for part in parts]
            announcer = Announcer([None if unshared is None else unshared.targets for unshared in started])
            for part, unshared in zip(parts, started, strict=True):
                if local.machine.failed:
                    break
                announcer.begin(() if unshared is None else unshared.targets)
                if unshared is None:
                    actions = local.on_gradient(part.message_id, part.share)
                else:
                    actions = yield from self._execute(local, unshared)
                back += yield from self.perform(local, actions, sender, announcer=announcer)
        back += yield from self.perform(local, local.on_handled(), sender)
        return back

    def on_give_back(self, data: bytes) -> Steps:
        head = PassHead.parse(data)
        local = self._local(head)
        yield from self.perform(local, local.on_credit(head.share))

    def on_release_sources(self, data: bytes, used: tuple[int, ...]) -> Steps:
        head = PassHead.parse(data)
        local = self._local(head)
        local.partners.add(local.id.origin)
        try:
            yield from self.perform(local, local.on_release(used, head.share))
        except PassError:
            local.fail()
            raise

    def on_survey(self, data: bytes, message_ids: tuple[int, ...]) -> Steps:
        local = self._local(PassHead.parse(data))
        yield 0.0
        return sorted(local.machine.reach(message_ids))

    def on_reach(self, sender: int, data: bytes, message_ids: tuple[int, ...]) -> Steps:
        local = self._local(PassHead.parse(data))
        local.partners.add(sender)
        yield 0.0
        return pack_reached(local.reached_by(message_ids))

    def on_prepare(self, data: bytes, numbers: tuple[int, ...]) -> Steps:
        local = self._local(PassHead.parse(data))
        yield 0.0
        local.prepare(unpack_needed(numbers))

    # Failure: see ``origin`` for the other half

    def fail(self, local: LocalPass, error: PassError) -> Steps:
        """A pass can't go on because of something that happened here."""
        if local.fail():
            yield from self.tell_origin(local, error)

    def tell_origin(self, local: LocalPass, error: PassError) -> Steps:
        origin = local.id.origin
        self.world.trace("%d: %s fails: %s", self.rank, local.history, error)
        if origin == self.rank:
            if local.id in self.origins:
                self.origins[local.id].fail(error)
            return
        while origin not in self.dead:
            try:
                return (yield self.call(local, origin, "failed", local.id))
            except PassError:
                yield 0.3

    def on_failed(self, pass_id: PassId) -> Steps:
        yield 0.0
        if pass_id in self.origins:
            self.origins[pass_id].fail(PassError("a worker says so"))

    def on_abort(self, pass_id: PassId) -> Steps:
        """Drop the pass; returns the workers that may have to be told too."""
        yield 0.0
        if self.context is None:
            return []
        self.context.aborted.add(pass_id)
        local = self.context.passes.pop(pass_id, None)
        if local is not None:
            self.undo(local)
        return sorted(self.context.known)  # also when asked again: the first answer may have been lost

    def undo(self, local: LocalPass) -> None:
        local.undo()

    def orphaned(self, local: LocalPass) -> None:
        """The origin has died."""
        if local.machine.active:
            self.undo(local)

    def lost(self, rank: int) -> None:
        """The connection to a worker broke: its part of a pass may be lost, and maybe nobody else reports it.

        Also if the pass has failed here: maybe only that worker was told so.
        """
        for local in list(self.context.passes.values() if self.context is not None else ()):
            if rank in local.partners and not local.machine.ended:
                error = PassError(f"the connection to {rank} is lost")
                start(self, self.fail(local, error) if local.machine.active else self.tell_origin(local, error))

    def died(self, rank: int) -> None:
        if self.crashed or rank in self.dead:
            return
        self.world.trace("%d takes %d for dead", self.rank, rank)
        self.dead.add(rank)
        if self.context is None:
            return
        for pass_id, local in self.context.passes.items():
            if pass_id.origin == rank:
                self.orphaned(local)
        if self.world.maker == rank:
            self.on_release()
        elif self.world.maker != self.rank and rank in self.context.known:
            start(self, self.ask_maker())
