"""One run: everything that follows from a seed.

The caller opens a stream, takes items when it likes, and may stop, or close it at any moment, also before the callee
has opened it. Requests are run in any order, as by the threads of a pool, and answers arrive in any. The generator ends
or raises somewhere. The connection may be lost.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from farprop.protocol.streams import Answer, Close, Consumer, Fail, Producer, Run, StreamNumbers
from tests.simulation.harness import Outcome, Violation

_NUMBER = 7
_MOST_STEPS = 5000


class World:
    def __init__(self, seed: int, tracing: bool) -> None:
        self.chance = chance = random.Random(seed)
        self.tracing = tracing
        self.counts: Counter[str] = Counter()
        self.window = chance.choice([1, 1, 2, 3, 4, 8, 16])
        self.length = chance.choice([0, 1, 2, 5, 10, 30])
        self.error = ValueError("planted") if chance.random() < 0.3 else None
        # How many items the program takes: all, or so many, and then it closes the stream, or holds it.
        self.wanted = chance.randrange(self.length + 1) if chance.random() < 0.4 else self.length + 1
        self.holds = chance.random() < 0.3
        self.is_cut = chance.random() < 0.15
        self.cut_after = chance.randrange(60)
        # The caller's end.
        self.consumer = Consumer(self.window)
        self.is_open = False
        self.is_closed = False
        self.arrived: dict[int, Any] = {}
        self.next_pull = 0
        self.unused: deque[int] = deque()
        self.taken = 0
        self.end: str | None = None
        # On the way.
        self.requests: list[tuple[Any, ...]] = [("open",)]
        self.answers: list[tuple[Any, ...]] = []
        self.unanswered: set[int] = set()
        self.is_lost = False
        # The callee's end.
        self.numbers = StreamNumbers()
        self.producer: Producer | None = None
        self.was_opened = False
        self.runs = 0
        self.produced = 0
        self.generator = "new"
        self.say("window %d, %d items, error %s, takes %d", self.window, self.length, self.error, self.wanted)

    def say(self, text: str, *things: object) -> None:
        if self.tracing:
            print(text % things)

    def run(self) -> None:
        while moves := list(self._moves()):
            self.counts["steps"] += 1
            if self.counts["steps"] > _MOST_STEPS:
                raise Violation("it goes on for ever")
            if self.is_cut and self.counts["steps"] > self.cut_after and not self.is_lost:
                self._cut()
                continue
            self.chance.choice(moves)()
            if self.produced - self.taken > self.window and not self.is_closed:
                raise Violation(f"{self.produced} items produced, {self.taken} taken, window {self.window}")
        self._check()

    def _moves(self) -> Iterator[Callable[[], None]]:
        for request in self.requests:
            yield lambda request=request: self._run_request(request)  # type: ignore[misc]
        for answer in self.answers:
            yield lambda answer=answer: self._deliver(answer)  # type: ignore[misc]
        if self.runs:
            yield self._step
        if not self.is_closed and self.end is None and not self.is_lost:
            if self.taken < self.wanted:
                if self.is_open and (self.unused or self.next_pull in self.arrived or self.consumer.is_over):
                    yield self._take
                elif self.is_open and not self.unanswered:
                    yield self._send_pulls
            elif not self.holds:
                yield self._close

    # The caller

    def _take(self) -> None:
        if not self.unused and self.next_pull in self.arrived:
            items, is_end, error = self.arrived.pop(self.next_pull)
            self.next_pull += 1
            if error is not None:
                self.end = "error"
                return
            self.consumer.on_answer(len(items), is_end)
            self.unused.extend(items)
        if not self.unused:
            if self.consumer.is_over:
                self.end = "end"
            self._send_pulls()
            return
        item = self.unused.popleft()
        if item != self.taken:
            raise Violation(f"item {item} came where {self.taken} should")
        self.taken += 1
        self.counts["items"] += 1
        self.consumer.on_taken()
        self._send_pulls()

    def _send_pulls(self) -> None:
        for pull in self.consumer.pulls():
            self.say("pull %d up to %d", *pull)
            self.counts["pulls"] += 1
            self.unanswered.add(pull.number)
            self.requests.append(("pull", *pull))

    def _close(self) -> None:
        self.say("the caller closes it")
        self.counts["early closes"] += 1
        self.is_closed = True
        if not self.consumer.is_over:
            self.requests.append(("close",))
        self.consumer.on_closed()

    def _deliver(self, answer: tuple[Any, ...]) -> None:
        self.answers.remove(answer)
        number, items, is_end, error = answer
        if number is None:
            self.is_open = True
            if not self.is_closed:
                self._send_pulls()
            return
        if number not in self.unanswered:
            raise Violation(f"pull {number} is answered twice")
        self.unanswered.discard(number)
        self.arrived[number] = items, is_end, error

    # The callee

    def _run_request(self, request: tuple[Any, ...]) -> None:
        self.requests.remove(request)
        self.say("runs %s", request)
        kind, *rest = request
        if kind == "open":
            if self.numbers.may_open(_NUMBER):
                self.was_opened = True
                self.producer = Producer(self.window)
                self._perform(self.producer.on_opened())
            self.answers.append((None, (), False, None))
        elif kind == "pull":
            number, allowed = rest
            if self.producer is None:
                self.answers.append((number, (), True, None))
            else:
                self._perform(self.producer.on_pull(number, allowed, number))
        elif self.producer is None:
            self.counts["closes of unknown streams"] += 1
            self.numbers.on_unknown_close(_NUMBER)
        else:
            self._perform(self.producer.on_close())
        self._forget_if_done()

    def _perform(self, actions: list[Any]) -> None:
        for action in actions:
            self.say("%s", action)
            if isinstance(action, Run):
                if self.runs or self.generator != "new":
                    raise Violation(f"a generator that is {self.generator} should run, {self.runs} threads run it")
                self.runs += 1
            elif isinstance(action, Close):
                if self.runs or self.generator != "new":
                    raise Violation(f"a generator that is {self.generator} is closed, {self.runs} threads run it")
                self.generator = "closed"
            elif isinstance(action, Answer):
                self.counts["answers"] += 1
                self.counts["answers with several items"] += len(action.items) > 1
                self.answers.append((action.pull, action.items, action.is_end, None))
            elif isinstance(action, Fail):
                self.answers.append((action.pull, (), True, action.error))

    def _step(self) -> None:
        assert self.producer is not None
        self.runs = 0
        if self.produced < self.length:
            self.produced += 1
            actions = self.producer.on_item(self.produced - 1, self.chance.random() < 0.7)
        else:
            self.generator = "over"
            actions = self.producer.on_end() if self.error is None else self.producer.on_error(self.error)
        goes_on = self.producer.is_running and not any(isinstance(action, Run) for action in actions)
        self._perform(actions)
        self.runs += goes_on
        self._forget_if_done()

    def _forget_if_done(self) -> None:
        if self.producer is not None and self.producer.is_done:
            self.producer = None

    def _cut(self) -> None:
        """The connection is lost: what is on the way is gone, and the callee closes the stream."""
        self.say("the connection is lost")
        self.counts["lost connections"] += 1
        self.is_lost = True
        self.requests.clear()
        self.unanswered.clear()
        if self.producer is not None:
            self._perform(self.producer.on_close())
        self.answers.clear()
        self._forget_if_done()

    # What must hold in the end

    def _check(self) -> None:
        if self.is_lost or self.is_closed:
            if self.was_opened and self.generator == "new":
                raise Violation("the generator was never closed")
            if self.producer is not None:
                raise Violation("the callee keeps a stream that nobody has")
            if self.unanswered:
                raise Violation(f"pulls {self.unanswered} have no answer")
        elif self.end is not None:
            if self.taken != self.length:
                raise Violation(f"it ended after {self.taken} of {self.length} items")
            if (self.end == "error") != (self.error is not None):
                raise Violation(f"it ended with {self.end}")
            if self.unanswered:
                raise Violation(f"pulls {self.unanswered} have no answer")
            if self.producer is not None:
                raise Violation("the callee keeps a stream that has ended")
        elif self.taken < self.wanted:
            raise Violation(f"the caller waits for item {self.taken} for ever")
        elif self.produced < min(self.length, self.taken + (self.window + 1) // 2):
            raise Violation(f"the generator is not ahead: {self.produced} produced, {self.taken} taken")


def run(seed: int, tracing: bool = False) -> Outcome:
    world = World(seed, tracing)
    failure = None
    try:
        world.run()
    except (Violation, AssertionError) as error:
        failure = str(error) or type(error).__name__
    return Outcome(seed, failure, world.counts, "streams")
