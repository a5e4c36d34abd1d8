"""Settings from ``FARPROP_*`` environment variables, read once per ``init_rpc``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from farprop.errors import UsageError

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """The settings, with their defaults."""

    transport: str = "auto"
    interface: str | None = None
    host_name: str = ""
    port_range: tuple[int, int] | None = None
    secret: str | None = field(default=None, repr=False)
    secret_file: str | None = None
    insecure: bool = False
    tls: bool = True
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    max_message_bytes: int = 16 * GIB
    queue_bytes: int = GIB
    outbox_bytes: int = 64 * MIB
    in_flight_bytes: int = 256 * MIB
    when_full: str = "wait"
    shm_pool_bytes: int = GIB
    on_failure: str = "tell"
    autograd_mode: str = "smart"
    restricted: bool = False
    send_autocast: bool = True
    spin_microseconds: int = 2000
    job_name: str = ""

    @property
    def tls_files(self) -> tuple[str, str, str] | None:
        """The paths of the user's certificate, key and CA; None without them."""
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return self.tls_cert, self.tls_key, self.tls_ca

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Read and check the variables.

        Args:
            env: the environment.

        Raises:
            UsageError: a variable is invalid. The text names it.
        """
        return cls(
            autograd_mode=_choice(env, "FARPROP_AUTOGRAD_MODE", {"smart": "", "fast": ""}),
            on_failure=_choice(
                env,
                "FARPROP_ON_FAILURE",
                {"tell": "the death of a worker is told to those who ask", "end": "this process ends, too"},
            ),
            when_full=_choice(
                env, "FARPROP_WHEN_FULL", {"wait": "calls wait for room", "raise": "they raise OverloadedError"}
            ),
            transport=_choice(
                env,
                "FARPROP_TRANSPORT",
                {"auto": "Unix sockets and shared memory within a host, TCP between hosts", "tcp": "TCP alone"},
            ),
            interface=env.get("FARPROP_INTERFACE") or None,
            host_name=env.get("FARPROP_HOST_NAME", ""),
            job_name=env.get("FARPROP_JOB_NAME", ""),
            port_range=_port_range(env.get("FARPROP_PORT_RANGE")),
            secret=env.get("FARPROP_SECRET") or None,
            secret_file=env.get("FARPROP_SECRET_FILE") or None,
            restricted=_switch(env, "FARPROP_RESTRICTED", False),
            send_autocast=_switch(env, "FARPROP_SEND_AUTOCAST", True),
            insecure=_switch(env, "FARPROP_INSECURE", False),
            tls=_switch(env, "FARPROP_TLS", True),
            max_message_bytes=_number(env, "FARPROP_MAX_MESSAGE_BYTES", cls.max_message_bytes, "bytes"),
            queue_bytes=_number(env, "FARPROP_QUEUE_BYTES", cls.queue_bytes, "bytes"),
            outbox_bytes=_number(env, "FARPROP_OUTBOX_BYTES", cls.outbox_bytes, "bytes"),
            in_flight_bytes=_number(env, "FARPROP_IN_FLIGHT_BYTES", cls.in_flight_bytes, "bytes"),
            shm_pool_bytes=_number(env, "FARPROP_SHM_POOL_BYTES", cls.shm_pool_bytes, "bytes"),
            spin_microseconds=_number(
                env, "FARPROP_SPIN_MICROSECONDS", cls.spin_microseconds, "microseconds, a million at most", 1_000_000
            ),
            **_tls_files(env),
        )


def _choice(env: Mapping[str, str], name: str, meanings: Mapping[str, str]) -> str:
    """One of these values; the first one is the default."""
    value = env.get(name) or next(iter(meanings))
    if value not in meanings:
        known = " or ".join(f"{text!r} ({meaning})" if meaning else repr(text) for text, meaning in meanings.items())
        raise UsageError(f"{name}={value!r} is not known: use {known}.")
    return value


def _switch(env: Mapping[str, str], name: str, default: bool) -> bool:
    text = env.get(name, "")
    if text not in ("", "0", "1"):
        raise UsageError(f"{name}={text!r} is not known: use 0 or 1.")
    return text == "1" if text else default


def _tls_files(env: Mapping[str, str]) -> dict[str, str]:
    files = {f"tls_{what}": env.get(f"FARPROP_TLS_{what.upper()}", "") for what in ("cert", "key", "ca")}
    if not any(files.values()):
        return {}
    if not all(files.values()):
        raise UsageError(
            "FARPROP_TLS_CERT, FARPROP_TLS_KEY and FARPROP_TLS_CA go together: this worker's certificate and its key, "
            "and the certificate of the authority that signed those of all workers. Set all three or none."
        )
    return files


def _port_range(text: str | None) -> tuple[int, int] | None:
    if not text:
        return None
    first, dash, last = text.partition("-")
    try:
        low, high = int(first), int(last if dash else first)
    except ValueError:
        low, high = 0, -1
    if not 1 <= low <= high <= 65535:
        raise UsageError(
            f"FARPROP_PORT_RANGE={text!r} is not a range of ports: write it as FIRST-LAST, such as 20000-20100."
        )
    return low, high


def _number(env: Mapping[str, str], name: str, default: int, what: str, most: float = math.inf) -> int:
    text = env.get(name)
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= most:
        raise UsageError(f"{name}={text!r} is not a number of {what}.")
    return value
