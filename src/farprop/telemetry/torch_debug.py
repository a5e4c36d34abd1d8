"""Farprop's answers in torch's debug server (``torch.distributed.debug``), beside torch's own.

The server asks every rank, and shows the answers on one page. It has no password, and listens on all addresses: see
torch's own warning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from farprop._torch import debug_frontend, register_debug_handler
from farprop.protocol import waits
from farprop.protocol.inspection import CALLS, STACKS, STATE, Answer
from farprop.runtime.agent import Agent
from farprop.runtime.agent_registry import current_agent, is_agent_set

_ASK_SECONDS = 1.0
_TEXT, _JSON = "text/plain", "application/json"
_is_registered = False


def register() -> None:
    """Have this rank's worker server answer ``POST /handler/farprop_ps``, ``farprop_why`` and ``farprop_stacks``.

    It may be called before or after ``start_debug_server``, and again. Until that server is started, nobody can ask.

    Raises:
        TorchVersionError: This torch has no debug server.

    Example:
        ``farprop.telemetry.torch_debug.register()``
    """
    global _is_registered
    if not _is_registered:
        _is_registered = True  # torch refuses a second time
        for name, answer in _ANSWERS.items():
            register_debug_handler(f"farprop_{name}", _handler(answer))


def page() -> Any:
    """Farprop's part of the server's page, for the argument ``handlers`` of ``start_debug_server``.

    Returns:
        A handler, to be put beside torch's own ``default_handlers()``. All ranks have to call ``register``.

    Raises:
        TorchVersionError: This torch has no debug server.
        ImportError: A package that torch's page needs is not installed.

    Example:
        ``start_debug_server(handlers=[*default_handlers(), farprop.telemetry.torch_debug.page()])``
    """
    frontend = debug_frontend()

    class FarpropHandler(frontend.DebugHandler):  # type: ignore[name-defined,misc]
        """One page for each question."""

        def routes(self) -> list[Any]:
            return [frontend.Route(f"/farprop_{name}", self._page(name)) for name in _ANSWERS]

        def nav_links(self) -> list[Any]:
            return [frontend.NavLink(f"/farprop_{name}", f"farprop {name}") for name in _ANSWERS]

        def _page(self, name: str) -> Callable[[Any], bytes]:
            def page(request: Any) -> bytes:
                addresses, answers = frontend.fetch_all(f"farprop_{name}", timeout=self.fetch_timeout)
                shown: bytes = request.frontend.render_template(
                    "raw_resp.html", title=f"farprop {name}", addrs=addresses, resps=answers
                )
                return shown

            return page

    return FarpropHandler()


def _handler(answer: Callable[[Agent], tuple[str, str]]) -> Callable[[Any, Any], None]:
    def handle(request: Any, response: Any) -> None:
        if not is_agent_set():
            response.set_content("RPC is not initialised on this rank.\n", _TEXT)
            response.set_status(503)
            return
        response.set_content(*answer(current_agent()))
        response.set_status(200)

    return handle


def _ps(agent: Agent) -> tuple[str, str]:
    return _as_json(agent.snapshots.snapshot(STATE, discreet=agent.dialect.restricted))


def _stacks(agent: Agent) -> tuple[str, str]:
    return _as_json(agent.snapshots.snapshot(STACKS, discreet=agent.dialect.restricted).threads)


def _as_json(value: Any) -> tuple[str, str]:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode(), _JSON


def _why(agent: Agent) -> tuple[str, str]:
    own = agent.snapshots.snapshot(CALLS, discreet=agent.dialect.restricted)

    def ask(worker: str) -> Answer:
        return own if worker == own.name else agent.inspector.ask(worker, CALLS, _ASK_SECONDS)

    calls = [call for call in own.awaited if call.parent is None and call.is_waited_for and not call.system]
    sentences = [waits.explain(call, ask).sentence for call in calls] or [waits.doings(own, ask)]
    return "\n".join(sentences) + "\n", _TEXT


_ANSWERS: dict[str, Callable[[Agent], tuple[str, str]]] = {"ps": _ps, "why": _why, "stacks": _stacks}
