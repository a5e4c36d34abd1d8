"""Ray: an actor in its own process. Runs in Ray's venv."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

from bench.channel import Sample, serve, take_stdout

MEGABYTES = {"echo-1mb": 1, "echo-128mb": 128}


class Actor:
    def noop(self) -> None:
        return None

    def echo(self, x: Any) -> Any:
        return x


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

        def prepare(name: str) -> Sample:
            if name == "empty":
                return lambda: ray.get(actor.noop.remote())
            size, _, kind = name.partition(":")
            x = torch.arange(MEGABYTES[size] << 18, dtype=torch.float32)
            # Ray passes NumPy arrays to the reader without a copy, and pickles tensors
            value = x.numpy() if kind == "numpy" else x
            back = ray.get(actor.echo.remote(value))
            # Ray's arrays are read-only, which torch warns about
            if not torch.equal(torch.from_numpy(back.copy()) if kind == "numpy" else back, x):
                raise AssertionError("Ray gave back another tensor")
            return lambda: ray.get(actor.echo.remote(value))

        ray.get(actor.noop.remote())
        serve(prepare, reply_fd)
        ray.shutdown()
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
