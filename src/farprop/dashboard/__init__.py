"""The live page: a job in the browser, while it runs.

:func:`start` serves it from one of the workers, the command ``farprop dashboard`` from outside of the job. It needs the
extra ``dashboard``: ``pip install 'farprop[dashboard]'``.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farprop.dashboard.server import Server

__all__ = ["start", "Dashboard"]


class Dashboard:
    """A page that is served. Used as a context manager, it stops at the end.

    Args:
        server: What serves it.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def url(self) -> str:
        """The address of the page, with the token that opens it."""
        return self._server.url

    def stop(self) -> None:
        """Stop to serve the page. Pages that are open stay as they are. A second time does no harm."""
        self._server.stop()

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        # Without the token: representations end up in logs.
        return f"<Dashboard at {self.url.partition('?')[0]}>"


def start(host: str = "127.0.0.1", port: int = 0) -> Dashboard:
    """Serve the live page of this job from this worker, until it is stopped or the process ends.

    Args:
        host: The address to listen on. Only processes of this host can reach the default. With another address, what
            the page shows crosses the network unencrypted: a tunnel of SSH is better.
        port: The port to listen on; 0 for any that is free.

    Returns:
        The dashboard. Open its ``url`` in a browser.

    Raises:
        UsageError: This process is not a worker, the extra is not installed, or the port is taken.

    Example:
        ``print(farprop.dashboard.start().url)``
    """
    from farprop.dashboard.server import Server
    from farprop.dashboard.sources import Inside
    from farprop.runtime.agent_registry import current_agent

    current_agent()  # raises
    return Dashboard(Server(Inside(), host, port))


def __dir__() -> list[str]:
    return __all__
