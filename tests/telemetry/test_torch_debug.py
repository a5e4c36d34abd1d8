"""Farprop's answers in torch's own debug server, on loopback."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from torch._C._distributed_c10d import _WorkerServer

import farprop.rpc as rpc
from farprop.telemetry import torch_debug
from tests.inspection import functions as inspected
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport

_left: list[Callable[[], Any]] = []


def _get(url: str) -> str:
    """Worker servers want a POST, the page a GET."""
    with urllib.request.urlopen(url, b"" if "/handler/" in url else None, timeout=20) as answer:
        return answer.read().decode()  # type: ignore[no-any-return]


def _serve(rank: int) -> int:
    """What ``start_debug_server`` does on every rank, on loopback alone."""
    from torch.distributed.debug._store import tcpstore_client

    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), "2"
    torch_debug.register()
    torch_debug.register()  # again does no harm
    server = _WorkerServer("127.0.0.1", 0)
    _left.append(server.shutdown)
    tcpstore_client().set(f"rank{rank}", f"http://127.0.0.1:{server.port}")
    return server.port  # type: ignore[no-any-return]


def _serve_page() -> int:
    """What its frontend does, on loopback alone."""
    from torch.distributed.debug import _frontend

    _frontend._IPv6HTTPServer = lambda address, handler: ThreadingHTTPServer(("127.0.0.1", address[1]), handler)  # type: ignore[misc,assignment]
    page = torch_debug.page()
    page.fetch_timeout = 20.0
    server = _frontend.FrontendServer(0, [page])
    _left.append(server.join)
    _left.append(server._server.server_close)
    _left.append(server._server.shutdown)
    return server._server.server_port


def _stop() -> None:
    while _left:
        _left.pop()()


def test_the_worker_server_and_the_page() -> None:
    with cluster(2) as job:
        ports = [job.run(rank, _serve, rank) for rank in (0, 1)]
        page = f"http://127.0.0.1:{job.run(0, _serve_page)}"
        waiting = job.start(0, rpc.rpc_sync, "worker1", inspected.wait_here, (), {}, 0)
        job.run(0, inspected.is_running, "wait_here")
        answers = f"http://127.0.0.1:{ports[0]}/handler"
        assert _get(f"{answers}/farprop_why").startswith("worker0 waits for worker1.wait_here (")
        state = json.loads(_get(f"{answers}/farprop_ps"))
        assert state["member"]["name"] == "worker0"
        assert [call["function"].rpartition(":")[2] for call in state["awaited"]] == ["wait_here"]
        stacks = _get(f"http://127.0.0.1:{ports[1]}/handler/farprop_stacks")
        assert "wait_here" in {frame["function"] for thread in json.loads(stacks) for frame in thread["frames"]}
        shown = _get(f"{page}/farprop_why")
        assert "worker0 waits for worker1.wait_here (" in shown
        assert "worker1 is in" in shown or "main thread of worker1" in shown or "worker1 runs `wait_here`" in shown
        assert "farprop stacks" in shown  # the links to the other pages
        job.run(1, inspected.release)
        waiting.result()
        for rank in (1, 0):
            job.run(rank, _stop)


def _serve_alone() -> tuple[int, str]:
    torch_debug.register()
    server = _WorkerServer("127.0.0.1", 0)
    try:
        _get(f"http://127.0.0.1:{server.port}/handler/farprop_why")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    finally:
        server.shutdown()
    return 0, ""


def test_a_process_that_is_no_worker_says_so() -> None:
    from tests.support.workers import processes

    with processes(1) as job:
        assert job.run(0, _serve_alone) == (503, "RPC is not initialised on this rank.\n")
