"""The rendezvous of torch's elastic agents, with signatures: what agents read of each other is not trusted before.

Agents keep their state pickled in a store that anyone who reaches its port can write to, so whoever does so could run
code on every host of the job, also of a job on one host. Here each state is signed with the job's secret, and is not
unpickled unless the signature is right. ``farprop run`` uses it, and so does ``torchrun --rdzv-backend=farprop``.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

LAUNCH = "launch"  # the plane of these signatures
BACKEND = "farprop"
MAY_HOST = "may_host"  # for the rendezvous' configuration: the endpoint is at this host
_NAME = "state"


def get_handler() -> Callable[[Any], Any]:
    """What makes a rendezvous handler, for torch's registry. Nothing is imported before it is used."""
    return create_handler


def create_handler(parameters: Any) -> Any:
    """Make a rendezvous handler.

    Args:
        parameters: torch's ``RendezvousParameters``, as for its backend ``c10d``.

    Raises:
        UsageError: there is no secret.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

    from farprop.config import Settings
    from farprop.protocol.signing import Keys, Unsigned
    from farprop.runtime.secret import given_secret

    keys = Keys(given_secret(Settings.from_env()).key, parameters.run_id, LAUNCH)

    class Signed(dynamic_rendezvous.RendezvousBackend):
        """A backend whose states are signed."""

        def __init__(self, backend: Any) -> None:
            self._backend = backend

        @property
        def name(self) -> str:
            return BACKEND

        def get_state(self) -> Any:
            found = self._backend.get_state()
            return None if found is None else (_read(found[0]), *found[1:])

        def set_state(self, state: bytes, token: Any = None) -> Any:
            signed = keys.sign(_NAME, b64encode(state).decode()).encode()
            found = self._backend.set_state(signed, token)
            return None if found is None else (_read(found[0]), *found[1:])

    def _read(value: bytes) -> bytes:
        try:
            return b64decode(keys.read(_NAME, value))
        except Unsigned as error:
            raise RendezvousStateError(
                "the state in the store is not signed with this job's secret. Do all hosts have the same secret, and "
                f"who else can reach {parameters.endpoint}?"
            ) from error

    def _backend() -> tuple[Any, Any]:
        if parameters.get_as_bool(MAY_HOST):
            # Another launcher of the job may run on this host, and open the store at any moment: only to try tells.
            try:
                parameters.config["is_host"] = "1"
                return create_backend(parameters)
            except RendezvousConnectionError:
                parameters.config["is_host"] = "0"
        return create_backend(parameters)

    backend, store = _backend()
    return dynamic_rendezvous.create_handler(store, Signed(backend), parameters)
