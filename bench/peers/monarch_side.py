"""Monarch: an actor in its own process. Runs in Monarch's venv."""

from __future__ import annotations

from bench.channel import Sample, serve, take_stdout

MEGABYTES = {"echo-1mb": 1, "echo-128mb": 128}


def main() -> None:
    reply_fd = take_stdout()
    import torch
    from monarch.actor import (  # type: ignore[import-not-found]
        Actor,
        endpoint,
        shutdown_context,
        this_host,
    )

    class Echo(Actor):  # type: ignore[misc]
        @endpoint  # type: ignore[untyped-decorator]
        def noop(self) -> None:
            return None

        @endpoint  # type: ignore[untyped-decorator]
        def echo(self, x: torch.Tensor) -> torch.Tensor:
            return x

    torch.set_num_threads(1)
    actor = this_host().spawn_procs(per_host={"procs": 1}).spawn("echo", Echo)

    def prepare(name: str) -> Sample:
        if name == "empty":
            return lambda: actor.noop.call_one().get()
        x = torch.arange(MEGABYTES[name] << 18, dtype=torch.float32)
        if not torch.equal(actor.echo.call_one(x).get(), x):
            raise AssertionError("Monarch gave back another tensor")
        return lambda: actor.echo.call_one(x).get()

    actor.noop.call_one().get()
    serve(prepare, reply_fd)
    shutdown_context().get()


if __name__ == "__main__":
    main()
