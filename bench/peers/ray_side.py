"""Ray: an actor in its own process. Runs in Ray's venv."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from typing import Any

from bench.channel import Sample, serve, take_stdout

MEGABYTES = {"echo-1mb": 1, "echo-128mb": 128}
IN_TURN, TOGETHER = 20, 1000  # as in bench.cases.awaiting, which is not imported in Ray's venv
STREAMS = {"stream-small": 1000, "stream-1mb": 50}  # items, as in bench.cases.streams, which needs torch's RPC


class Actor:
    def noop(self) -> None:
        return None

    def echo(self, x: Any) -> Any:
        return x

    def numbers(self, count: int) -> Any:
        # Ray sends values into a generator, which a range does not take.
        for number in range(count):  # noqa: UP028
            yield number

    def tensors(self, count: int, as_array: bool) -> Any:
        import torch

        x = torch.arange(1 << 18, dtype=torch.float32)
        for _ in range(count):
            yield x.numpy() if as_array else x


class AsyncActor:
    async def noop(self) -> None:
        return None

    async def coroutine(self) -> None:
        await asyncio.sleep(0)


def main() -> None:
    reply_fd = take_stdout()
    import ray  # type: ignore[import-not-found]
    import torch

    torch.set_num_threads(1)
    # a short path, because Ray puts Unix sockets in it
    place = tempfile.mkdtemp(prefix="bench-ray-", dir="/tmp")
    try:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=place,
        )
        actor = ray.remote(Actor).remote()

        async_actor = ray.remote(AsyncActor).remote()
        loop = asyncio.new_event_loop()

        async def one_by_one() -> None:
            for _ in range(IN_TURN):
                await async_actor.noop.remote()

        async def together() -> None:
            await asyncio.gather(*[async_actor.coroutine.remote() for _ in range(TOGETHER)])

        def prepare(name: str) -> Sample:
            if name == "await":
                return lambda: loop.run_until_complete(one_by_one())
            if name == "coroutine-1000":
                return lambda: loop.run_until_complete(together())
            if name == "empty":
                return lambda: ray.get(actor.noop.remote())
            size, _, kind = name.partition(":")
            if size in STREAMS:
                method = actor.numbers if size == "stream-small" else actor.tensors
                args = (STREAMS[size],) if size == "stream-small" else (STREAMS[size], kind == "numpy")
                streaming = method.options(num_returns="streaming")
                return lambda: [ray.get(item) for item in streaming.remote(*args)]
            x = torch.arange(MEGABYTES[size] << 18, dtype=torch.float32)
            # Ray passes NumPy arrays to the reader without a copy, and pickles tensors
            value = x.numpy() if kind == "numpy" else x
            back = ray.get(actor.echo.remote(value))
            # Ray's arrays are read-only, which torch warns about
            if not torch.equal(torch.from_numpy(back.copy()) if kind == "numpy" else back, x):
                raise AssertionError("Ray gave back another tensor")
            return lambda: ray.get(actor.echo.remote(value))

        ray.get([actor.noop.remote(), async_actor.noop.remote()])
        serve(prepare, reply_fd)
        ray.shutdown()
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
