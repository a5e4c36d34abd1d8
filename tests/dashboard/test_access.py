"""Who gets to see the page: over real sockets, without a browser."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

import farprop.dashboard
import farprop.rpc as rpc
from farprop.dashboard.access import Access
from farprop.dashboard.server import Server
from farprop.dashboard.sources import Outside
from farprop.errors import UsageError
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with cluster(1, env={"FARPROP_JOB_NAME": "access"}):
        started = Server(Outside("access"), "127.0.0.1", 0)
        yield started
        started.stop()


def _ask(server: Server, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def _token(server: Server) -> str:
    return server.url.partition("token=")[2]


def _cookie(server: Server) -> str:
    return _ask(server, f"/?token={_token(server)}")[1]["set-cookie"]


@pytest.mark.parametrize(
    "path",
    ["/", "/main.js", "/events", "/?token=", "/?token=wrong", "/main.js?token={}", "/events?token={}", "/no-such"],
)
def test_nothing_is_shown_without_the_token(server: Server, path: str) -> None:
    status, headers, text = _ask(server, path.format(_token(server)), Cookie=f"farprop-dashboard-{server.port}=wrong")
    assert status == 403
    assert "set-cookie" not in headers
    assert "Open the whole address that <code>farprop dashboard</code> printed" in text


def test_token_becomes_a_cookie(server: Server) -> None:
    cookie = _cookie(server)
    assert cookie.startswith(f"farprop-dashboard-{server.port}={_token(server)};")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    given = cookie.partition(";")[0]
    for path, kind in {
        "/": "text/html",
        "/main.js": "text/javascript",
        "/style.css": "text/css",
        "/vendor/vendor.js": "text/javascript",
        "/icon.svg": "image/svg+xml",
    }.items():
        status, headers, _ = _ask(server, path, Cookie=given)
        assert (status, headers["content-type"].partition(";")[0]) == (200, kind)


@pytest.mark.parametrize(
    "path", ["/../server.py", "/%2e%2e/server.py", "/vendor/../../access.py", "/vendor/manifest.json"]
)
def test_nothing_but_the_page_is_served(server: Server, path: str) -> None:
    assert _ask(server, path, Cookie=_cookie(server).partition(";")[0])[0] in (400, 404)


def test_browser_is_told_to_do_nothing_else(server: Server) -> None:
    for path in ("/", f"/?token={_token(server)}"):
        headers = _ask(server, path)[1]
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "[::1", "localhost.evil"]
)
def test_other_names_of_the_server_are_refused(server: Server, host: str) -> None:
    """A site that has its name lead to this host must not be taken for the page."""
    status, headers, text = _ask(server, f"/?token={_token(server)}", Host=host)
    assert status in (400, 403)
    assert "set-cookie" not in headers
    assert "job" not in text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:9000", "[::1]:80", "LOCALHOST"])
def test_names_of_this_host_are_accepted(server: Server, host: str) -> None:
    assert _ask(server, f"/?token={_token(server)}", Host=host)[0] == 200


def test_server_of_a_network_is_known_by_its_addresses_and_its_name() -> None:
    access = Access("0.0.0.0")
    assert not access.is_loopback
    for name in ("10.1.2.3:80", "[fe80::1]:80", socket.gethostname(), "localhost"):
        assert access.is_known_host(name)
    assert not access.is_known_host("evil.example")
    assert Access("gpu7").is_known_host("gpu7:8000")


def test_tokens_are_long_and_new_each_time() -> None:
    tokens = {Access("127.0.0.1").token for _ in range(50)}
    assert len(tokens) == 50
    assert min(map(len, tokens)) >= 32


def test_stream_tells_the_state(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/events", headers={"Cookie": _cookie(server).partition(";")[0]})
    answer = connection.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream"
    assert re.fullmatch(rb"id: [0-9a-f]{8}\.\d+\n", answer.readline())
    assert b'"name":"worker0"' in answer.readline()
    connection.close()


def test_browser_that_reads_nothing_holds_nobody_up(server: Server) -> None:
    """Neither the other browsers, nor the end of the server."""
    cookie = _cookie(server).partition(";")[0]
    own = Server(Outside("access"), "127.0.0.1", 0)
    given = _cookie(own).partition(";")[0]
    with socket.create_connection(("127.0.0.1", own.port)) as stuck:
        stuck.sendall(f"GET /events HTTP/1.1\r\nHost: localhost\r\nCookie: {given}\r\n\r\n".encode())
        for _ in range(2):
            connection = http.client.HTTPConnection("127.0.0.1", own.port, timeout=30)
            connection.request("GET", "/events", headers={"Cookie": given})
            assert connection.getresponse().readline()
            connection.close()
        own.stop()
    assert _ask(server, "/", Cookie=cookie)[0] == 200


def test_port_that_is_taken_is_said(server: Server) -> None:
    with pytest.raises(UsageError, match=f"can't listen on 127.0.0.1, port {server.port}: "):
        Server(Outside("access"), "127.0.0.1", server.port)
    with pytest.raises(UsageError, match="must be from 0 to 65535"):
        Server(Outside("access"), "127.0.0.1", 70_000)
    with pytest.raises(UsageError, match="can't listen on no.such.host.invalid"):
        Server(Outside("access"), "no.such.host.invalid", 0)


def test_page_needs_a_job() -> None:
    with pytest.raises(RuntimeError):
        farprop.dashboard.start()
    with pytest.raises(UsageError, match="There is no job|No job"):
        Outside("no-such-job")


def test_extra_that_is_missing_is_named() -> None:
    program = "import sys; sys.modules['aiohttp'] = None; import farprop.dashboard.server"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "UsageError: The live page needs aiohttp: pip install 'farprop[dashboard]'." in done.stderr


def test_command_prints_the_address_and_ends_with_ctrl_c(server: Server) -> None:
    command = [sys.executable, "-m", "farprop", "dashboard", "access"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert process.stdout.readline() == "Ctrl-C stops it.\n"
    found = re.fullmatch(r"The job access is at (http://127\.0\.0\.1:\d+/\?token=\S+)\n", line)
    assert found, line + (process.stderr.read() if process.stderr and process.poll() is not None else "")
    url = urlsplit(found[1])
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
    connection.request("GET", f"/?{url.query}")
    assert connection.getresponse().status == 200
    connection.close()
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest, errors) == (0, "", "")


def test_dashboard_of_a_worker_does_not_print_its_token() -> None:
    with cluster(1) as job:
        shown, url = job.run(0, _shown_inside)
        assert shown == f"<Dashboard at {url.partition('?')[0]}>"


def _shown_inside() -> tuple[str, str]:
    assert rpc.get_worker_info().name == "worker0"
    with farprop.dashboard.start() as dashboard:
        dashboard.stop()  # a second time does no harm
        return repr(dashboard), dashboard.url
