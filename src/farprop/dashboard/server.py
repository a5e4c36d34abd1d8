"""The web server of the live page: a thread with an event loop, and a stream of messages for each browser."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from importlib import resources
from importlib.resources.abc import Traversable

from farprop.dashboard.access import HEADERS, NOT_ALLOWED, WRONG_HOST, Access
from farprop.dashboard.board import Board
from farprop.dashboard.picture import Part, State
from farprop.dashboard.poller import Poller
from farprop.dashboard.sources import Source
from farprop.errors import UsageError
from farprop.locks import make_lock

try:
    from aiohttp import web
except ImportError as error:
    raise UsageError("The live page needs aiohttp: pip install 'farprop[dashboard]'.") from error

_MOST_STREAMS = 32
_ALIVE_SECONDS = 15.0  # without news a stream gets a comment, so that one whose browser has gone is noticed
_STUCK_SECONDS = 30.0  # a browser that has read nothing for so long is let go; it comes back by itself
_CLOSE_SECONDS = 1.0

_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}


class Server:
    """Serves the page of one job until it is stopped. Methods may be called from any thread.

    Args:
        source: where the picture of the job comes from.
        host: the address or name to listen on.
        port: the port; 0 for any.

    Raises:
        UsageError: it can't listen there.
    """

    def __init__(self, source: Source, host: str, port: int) -> None:
        if not 0 <= port <= 65535:
            raise UsageError(f"The port of the live page is {port}, and must be from 0 to 65535.")
        self._access = Access(host)
        self._host = host
        self._port = port
        self._streams = 0
        self._files = _load(resources.files("farprop.dashboard") / "static")
        self._started: Future[None] = Future()
        self._poller = Poller(source, self._publish)
        self._lock = make_lock("dashboard")
        self._stopped = False
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="farprop-dashboard", daemon=True
        )
        self._thread.start()
        try:
            self._started.result()
        except OSError as error:
            self._thread.join()
            raise UsageError(f"The live page can't listen on {host}, port {port}: {error.strerror}.") from error
        self._poller.start()

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/?token={self._access.token}"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host can reach it."""
        return self._access.is_loopback

    def stop(self) -> None:
        """End the server and its threads. Open pages stay as they are. A second time does no harm."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        self._poller.close()
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join()

    # In the event loop

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._board = Board()
        self._stopping = asyncio.Event()
        app = web.Application(middlewares=[self._check])
        app.on_response_prepare.append(self._add_headers)
        app.router.add_get("/", self._page)
        app.router.add_get("/events", self._events)
        app.router.add_get("/{file:.+}", self._file)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_CLOSE_SECONDS)
        try:
            await runner.setup()
            await web.TCPSite(runner, self._host, self._port).start()
            self.port = runner.addresses[0][1]
            # Cookies don't know ports: two pages of one host must not have the same.
            self._cookie = f"farprop-dashboard-{self.port}"
        except BaseException as error:
            await runner.cleanup()
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        await self._stopping.wait()
        await runner.cleanup()

    def _end(self) -> None:
        self._board.close()
        self._stopping.set()

    def _publish(self, state: State | None, part: Part | None, note: str) -> None:
        self._loop.call_soon_threadsafe(self._board.post, state, part, note)

    @web.middleware
    async def _check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not self._access.is_known_host(request.headers.get("Host", "")):
            return web.Response(status=403, text=WRONG_HOST, content_type="text/html")
        given = request.query.get("token", "") if request.path == "/" else ""
        if given and self._access.is_token(given):
            response = await handler(request)
            # The page takes the token out of its address. It is no redirect: to one that began at another site, such
            # as a notebook, the browser would not bring the cookie.
            response.set_cookie(self._cookie, given, httponly=True, samesite="Strict", path="/")
            return response
        if self._access.is_token(request.cookies.get(self._cookie, "")):
            return await handler(request)
        return web.Response(status=403, text=NOT_ALLOWED, content_type="text/html")

    async def _add_headers(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)
        response.headers.pop("Server", None)

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return self._served("index.html")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        return self._served(request.match_info["file"])

    def _served(self, name: str) -> web.StreamResponse:
        found = self._files.get(name)
        if found is None:
            return web.Response(status=404, text="There is no such file.")
        body, content_type = found
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._streams >= _MOST_STREAMS:
            return web.Response(status=503, text="Too many pages are open.")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        number = self._board.number_of(request.headers.get("Last-Event-ID", ""))
        self._streams += 1
        self._poller.watch(1)
        try:
            await response.prepare(request)
            while not self._board.closed:
                try:
                    await asyncio.wait_for(self._board.wait_newer(number), _ALIVE_SECONDS)
                except TimeoutError:
                    text = b": still here\n\n"
                else:
                    number, message = self._board.message_since(number)
                    text = f"id: {self._board.label(number)}\ndata: ".encode() + message + b"\n\n"
                # One message is under way at a time, so a browser that reads slowly costs no more than that.
                await asyncio.wait_for(response.write(text), _STUCK_SECONDS)
        except (ConnectionError, TimeoutError):
            pass  # it has gone, or does not read
        finally:
            self._streams -= 1
            self._poller.watch(-1)
        return response


def _load(folder: Traversable, prefix: str = "") -> dict[str, tuple[bytes, str]]:
    """The files of the page, by their paths. Nothing else is ever served."""
    found: dict[str, tuple[bytes, str]] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found.update(_load(entry, f"{prefix}{entry.name}/"))
        elif (content_type := _TYPES.get(f".{entry.name.rpartition('.')[2]}")) is not None:
            found[f"{prefix}{entry.name}"] = entry.read_bytes(), content_type
    return found
