"""`python -m bench.dashboard`: what an empty call costs while somebody looks at the live page.

Two jobs of two workers run side by side. One of them is looked at. Batches of calls alternate between them.
"""

from __future__ import annotations

import http.client
import sys
import threading
import time
from multiprocessing.connection import Connection
from statistics import median

import torch.multiprocessing as mp

from bench import machine

CALLS = 200
BATCHES = 60
WARM_UP = 5


def _empty() -> None:
    pass


def _worker(rank: int, name: str, path: str, driver: Connection) -> None:
    import os

    os.environ["FARPROP_JOB_NAME"] = name
    import farprop.rpc as rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    while rank == 0 and driver.recv():
        began = time.perf_counter()
        for _ in range(CALLS):
            rpc.rpc_sync("w1", _empty)
        driver.send((time.perf_counter() - began) / CALLS)
    rpc.shutdown()


def _watch(port: int, token: str) -> http.client.HTTPConnection:
    """Be a browser: read all that the page is told."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/events", headers={"Cookie": f"farprop-dashboard-{port}={token}"})
    answer = connection.getresponse()
    assert answer.status == 200

    def read() -> None:
        while answer.read1(1 << 20):
            pass

    threading.Thread(target=read, daemon=True).start()
    return connection


def main() -> int:
    import tempfile

    from farprop.dashboard.server import Server
    from farprop.dashboard.sources import Outside

    print(machine.describe(machine.facts()))
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        drivers, processes = {}, []
        for name in ("watched", "alone"):
            drivers[name], its = context.Pipe()
            for rank in range(2):
                processes.append(context.Process(target=_worker, args=(rank, name, f"{directory}/{name}", its)))
        for process in processes:
            process.start()

        def batch(name: str) -> float:
            drivers[name].send(True)
            return float(drivers[name].recv())

        for name in drivers:
            for _ in range(WARM_UP):
                batch(name)
        before = [batch("watched") / batch("alone") for _ in range(BATCHES)]
        server = Server(Outside("watched"), "127.0.0.1", 0)
        _watch(server.port, server.url.partition("token=")[2])
        for _ in range(WARM_UP):
            batch("watched")
        pairs = [(batch("watched"), batch("alone")) for _ in range(BATCHES)]
        for driver in drivers.values():
            driver.send(False)
        for process in processes:
            process.join()
        server.stop()
    watched, alone = zip(*pairs, strict=True)
    ratio = median(one / other for one, other in pairs)
    print(
        f"an empty call, µs, best and median of {BATCHES} batches of {CALLS}: "
        f"looked at {min(watched) * 1e6:.1f} and {median(watched) * 1e6:.1f}, "
        f"not looked at {min(alone) * 1e6:.1f} and {median(alone) * 1e6:.1f}; "
        f"median of the ratios {ratio:.2f} (before anybody looked {median(before):.2f})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
