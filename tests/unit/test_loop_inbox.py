"""Wake-ups of asyncio loops from other threads: none is lost, and many completions take one."""

from __future__ import annotations

import asyncio
import threading

from farprop.runtime.loop_inbox import LoopInbox, running_inbox


class _CountingInbox(LoopInbox):
    wake_ups = 0

    def _take(self) -> None:
        self.wake_ups += 1
        super()._take()


def test_completions_that_the_loop_has_not_taken_share_a_wake_up() -> None:
    async def main() -> int:
        inbox = _CountingInbox(asyncio.get_running_loop())
        waiters = [inbox.loop.create_future() for _ in range(500)]
        waiters[3].cancel()
        thread = threading.Thread(target=lambda: [inbox.put(waiter) for waiter in waiters])
        thread.start()
        thread.join()  # the loop does nothing meanwhile
        await asyncio.gather(*waiters, return_exceptions=True)
        return inbox.wake_ups

    assert asyncio.run(main()) == 1


def test_no_wake_up_is_lost() -> None:
    async def main() -> None:
        inbox = running_inbox()
        assert running_inbox() is inbox
        for _ in range(20):
            waiters = [inbox.loop.create_future() for _ in range(300)]
            parts = [waiters[first::3] for first in range(3)]
            threads = [threading.Thread(target=lambda part=part: [inbox.put(w) for w in part]) for part in parts]
            for thread in threads:
                thread.start()
            await asyncio.wait_for(asyncio.gather(*waiters), 30)
            for thread in threads:
                thread.join()

    asyncio.run(main())


def test_loop_that_is_closed_is_left_alone() -> None:
    loop = asyncio.new_event_loop()
    inbox = LoopInbox(loop)
    waiter = loop.create_future()
    loop.close()
    inbox.put(waiter)
    inbox.put(waiter)
    assert not waiter.done()


def test_waiter_that_ctrl_c_cancels_in_the_middle_is_left_alone() -> None:
    """The handler of asyncio.run cancels the task between two opcodes, and with it what the task waits for."""

    class CancelledMeanwhile(asyncio.Future[None]):
        def done(self) -> bool:
            was_done = super().done()
            self.cancel()
            return was_done

    async def main() -> list[object]:
        reported: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, report: reported.append(report))
        inbox, cancelled, other = LoopInbox(loop), CancelledMeanwhile(loop=loop), loop.create_future()
        inbox.put(cancelled)
        inbox.put(other)
        await other
        return reported

    assert asyncio.run(main()) == []
