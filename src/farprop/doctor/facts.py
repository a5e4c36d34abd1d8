"""Facts about this process and its host. They are gathered here, and judged in ``checks.py``."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from pathlib import Path

import torch

import farprop
from farprop import _torch
from farprop.config import Settings
from farprop.errors import ProtocolError, UsageError
from farprop.runtime.secret import check_settings
from farprop.transport import sockets
from farprop.transport.shared_memory import new_shared_memory
from farprop.transport.tls import Certificates

# An address of nobody's, in another network. Nothing is sent there: the kernel is asked which way it would be.
_FAR_AWAY = "203.0.113.1"
_MOST_PORTS = 1000  # to try
_SEGMENT = 10_000_000
# Farprop's own variables that are no settings.
_INTERNAL = frozenset({"FARPROP_COMPAT_MAIN", "FARPROP_LAUNCHER_PID"})


@dataclass(frozen=True)
class Versions:
    farprop: str
    torch: str
    python: str
    is_tried: bool  # farprop was tested with this torch
    missing: Mapping[str, str]  # names that this torch lacks, and the features that need them


def versions() -> Versions:
    torch_version = str(torch.__version__)
    return Versions(
        farprop.__version__, torch_version, platform.python_version(), _torch.is_tried(torch_version), _torch.missing
    )


@dataclass(frozen=True)
class Cores:
    cores: int  # on which this process may run
    quota: float | None  # how many of them its control group may keep busy
    omp_num_threads: str | None
    threads: int  # of one operator of torch's


def cores() -> Cores:
    return Cores(len(os.sched_getaffinity(0)), _quota(), os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads())


def _quota() -> float | None:
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return float(quota) / float(period)  # "max" is no number
    return None


@dataclass(frozen=True)
class Variables:
    given: frozenset[str]  # the names of variables that look like settings of farprop's
    known: frozenset[str]
    problem: str  # why a setting is invalid; empty if all are fine


def variables(env: Mapping[str, str] = os.environ) -> Variables:
    try:
        Settings.from_env(env)
        problem = ""
    except UsageError as error:
        problem = str(error)
    known = frozenset(f"FARPROP_{field.name.upper()}" for field in fields(Settings)) | _INTERNAL
    return Variables(frozenset(name for name in env if name.startswith("FARPROP_")), known, problem)


@dataclass(frozen=True)
class Network:
    interface: str | None  # the setting
    address: str  # at which this host's workers listen for other hosts
    problem: str  # why they can't; empty if they can
    host: str
    resolved: tuple[str, ...]  # addresses of the host's name


def network(settings: Settings, towards: str = _FAR_AWAY) -> Network:
    problem, address = "", ""
    try:
        if settings.interface is None:
            address = sockets.address_towards(towards)
        else:
            address = sockets.interface_address(settings.interface)
        sockets.listen_tcp(address, None).close()
    except UsageError as error:
        problem = str(error)
    host = socket.gethostname()
    return Network(settings.interface, address, problem, host, addresses_of(host))


def addresses_of(host: str) -> tuple[str, ...]:
    """The addresses of a host's name; empty if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(place[4][0]) for place in found))


@dataclass(frozen=True)
class Ports:
    wanted: tuple[int, int] | None  # the setting
    tried: int
    free: int
    problem: str  # why the last one that is not free can't be had


def ports(settings: Settings, address: str) -> Ports:
    wanted = settings.port_range
    tried = range(wanted[0], min(wanted[1] + 1, wanted[0] + _MOST_PORTS)) if wanted else range(1)
    free, problem = 0, ""
    for port in tried:
        try:
            sockets.listen_tcp(address, (port, port) if wanted else None).close()
            free += 1
        except UsageError as error:
            problem = str(error)
    return Ports(wanted, len(tried), free, problem)


@dataclass(frozen=True)
class Memory:
    problem: str  # why shared memory can't be made; empty if it can
    available: int  # bytes, on this host and in this control group
    dev_shm: tuple[int, int] | None  # bytes of /dev/shm: all, and free ones


def memory() -> Memory:
    try:
        descriptor, _ = new_shared_memory(_SEGMENT)
        os.close(descriptor)
        problem = ""
    except (OSError, AttributeError) as error:
        problem = str(error)
    try:
        usage = shutil.disk_usage("/dev/shm")
        dev_shm = (usage.total, usage.free)
    except OSError:
        dev_shm = None
    return Memory(problem, _available_bytes(), dev_shm)


def _available_bytes() -> int:
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # "max" is no number
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        available = min(available, max(0, limit - used))
    return available


@dataclass(frozen=True)
class Secrecy:
    source: str  # the variable that gives the secret; empty if the workers find one by themselves
    is_given_twice: bool
    insecure: bool  # the setting
    problem: str  # why the secret can't be used; empty if it can


def secrecy(settings: Settings) -> Secrecy:
    given = {"FARPROP_SECRET": settings.secret, "FARPROP_SECRET_FILE": settings.secret_file}
    sources = [name for name, value in given.items() if value is not None]
    try:
        check_settings(settings)
        problem = ""
    except UsageError as error:
        problem = str(error)
    return Secrecy(sources[0] if sources else "", len(sources) > 1, settings.insecure, problem)


@dataclass(frozen=True)
class Tls:
    is_on: bool
    certificate: str | None  # the path of the user's own
    problem: str  # why a connection with it fails; empty if it does not
    valid_seconds: float  # for how long the user's own certificate is still valid


def tls(settings: Settings) -> Tls:
    files = settings.tls_files
    if files is None or not settings.tls:
        return Tls(settings.tls, files[0] if files else None, "", 0.0)
    try:
        _connect_to_itself(Certificates(files))
        problem = ""
    except (UsageError, ProtocolError) as error:
        problem = str(error)
    return Tls(True, files[0], problem, _valid_seconds(files[0]))


def _connect_to_itself(certificates: Certificates) -> None:
    """Make a TLS connection in memory: both ends check the certificate as those of other workers will."""
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        dialer = certificates.dial(ours)
        listener, _ = certificates.accept(theirs)
        is_done, data = dialer.handshake(b"")
        is_accepted = False
        while not (is_done and is_accepted):
            is_accepted, answer = listener.handshake(data)
            if not is_done:
                is_done, data = dialer.handshake(answer)


def _valid_seconds(path: str) -> float:
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(Path(path).read_bytes())
    except (OSError, ValueError):
        return 0.0
    return found[0].not_valid_after_utc.timestamp() - time.time()


@dataclass(frozen=True)
class Files:
    limit: int
    hard_limit: int
    opened: int


def files() -> Files:
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Files(limit, hard_limit, len(os.listdir("/proc/self/fd")))


@dataclass(frozen=True)
class Clock:
    now: float
    installed: float  # when farprop was installed here, by the same clock


def clock() -> Clock:
    return Clock(time.time(), os.stat(farprop.__file__).st_ctime)
