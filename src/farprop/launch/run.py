"""``farprop run``: workers on this host, or this host's part of a job on several, by torch's elastic agent.

The agent starts the processes, watches them, ends them together and starts them again; nodes meet by its rendezvous.
What is added here: the secret, the workers' names in front of their output, one report of a failure, and Ctrl-C.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError as ElasticRendezvousError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from farprop.config import Settings
from farprop.errors import RendezvousError, UsageError
from farprop.launch.failures import report
from farprop.launch.output import Output
from farprop.launch.script import LAUNCHER
from farprop.launch.signed_rendezvous import BACKEND, MAY_HOST, create_handler
from farprop.rpc.launchers import DEFAULT_PORT
from farprop.runtime.secret import check_settings
from farprop.transport import sockets

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MAKE_SECRET = "(umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > farprop.secret)"


def run(options: Sequence[str], program: Sequence[str], log_dir: str | None, colours: bool, debug: bool) -> int:
    """Run a program on all workers of this host, and wait until they have ended.

    Args:
        options: options of torchrun's.
        program: what each worker runs: a script, or ``-m`` and a module, and its arguments.
        log_dir: where to write the output of each worker, too; None for nowhere.
        colours: whether to show the workers' names in colours.
        debug: whether torch's elastic agent may say what it does.

    Returns:
        The exit code: 0, that of the worker that failed first, or 128 and the number of the signal.

    Raises:
        UsageError: an option is wrong, or a job on several hosts has no secret.
        RendezvousError: the hosts did not meet.
    """
    config = _config(options)
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="farprop-run-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        _set_secret(config.max_nodes)
        os.environ[LAUNCHER] = str(os.getpid())
        output = Output(colours)
        config.logs_specs = _Pipes(output, directory, log_dir)
        config.signals_to_handle = "SIGQUIT"  # the others are ours
        if not debug:
            _silence("torch.distributed.elastic")
        code = 0
        said = ""
        with _signals() as received:
            try:
                elastic_launch(config, sys.executable)("-u", "-m", "farprop.launch.script", *program)
            except SignalException:
                code = 128 + (received[0] if received else signal.SIGQUIT)
            except ChildFailedError as error:
                code, said = report(error)
            except ElasticRendezvousError as error:
                raise RendezvousError(
                    f"The hosts of the job did not meet: {str(error).rstrip('.')}. Run the same command on each of "
                    "them, with the same --nnodes and --rdzv-endpoint (or --master-addr, and another --node-rank)."
                ) from error
            finally:
                _kill_workers()  # those that were starting when a signal came
                output.finish()
        if said:
            print(said, file=sys.stderr)
        return code


def _silence(package: str) -> None:
    """Keep the loggers of a package quiet. Each has a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(package):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _config(options: Sequence[str]) -> LaunchConfig:
    rendezvous_handler_registry.register(BACKEND, create_handler)
    # The parser wants a program, and the rest of the job's description is all that is asked of it.
    arguments = torchrun.parse_args([*options, f"--log-dir={os.devnull}", "program"])
    if arguments.standalone:
        arguments.rdzv_endpoint, arguments.rdzv_id = "localhost:0", secrets.token_hex(8)
    elif arguments.rdzv_endpoint and arguments.rdzv_backend == BACKEND:
        _describe_host(arguments)
    elif arguments.master_port is None:
        arguments.master_port = DEFAULT_PORT
    if arguments.nproc_per_node != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, which says so at length: they share the cores
    try:
        config: LaunchConfig = torchrun.config_from_args(arguments)[0]
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    return config


def _describe_host(arguments: argparse.Namespace) -> None:
    """Say whether the hosts meet at this one, and which address it has for the others, unless the user has said so.

    Torch finds both out by the host's name, which others may not be able to resolve, or which has several addresses.
    """
    host, _ = parse_rendezvous_endpoint(arguments.rdzv_endpoint, default_port=DEFAULT_PORT)
    try:
        address = sockets.address_towards(host)
        is_own = socket.gethostbyname(host) == address
    except OSError as error:
        raise RendezvousError(
            f"The host {host!r} of --rdzv-endpoint can't be found: {error}. Is the name right, and known on this host?"
        ) from error
    if arguments.local_addr is None and not ipaddress.ip_address(address).is_loopback:
        arguments.local_addr = address
    if "is_host" not in arguments.rdzv_conf:
        found = f"{MAY_HOST}=1" if is_own else "is_host=0"
        arguments.rdzv_conf = ",".join(filter(None, [arguments.rdzv_conf, found]))


def _set_secret(nodes: int) -> None:
    settings = Settings.from_env()
    check_settings(settings)
    if settings.secret or settings.secret_file or settings.insecure:
        return
    if nodes > 1:
        raise UsageError(
            "A job on several hosts needs a secret that all of them have, or anyone on the network could run code on "
            f"them. Make one: {_MAKE_SECRET}, copy the file to every host, and pass --secret-file farprop.secret "
            "(or set FARPROP_SECRET_FILE)."
        )
    os.environ["FARPROP_SECRET"] = secrets.token_hex(32)  # only this user's processes can read it there


class _Pipes(LogsSpecs):
    """Tells the elastic agent to connect the workers' output to pipes that :class:`Output` reads."""

    def __init__(self, output: Output, directory: Path, log_dir: str | None) -> None:
        super().__init__(log_dir=str(directory))
        self._output = output
        self._directory = directory
        self._logs = None if log_dir is None else Path(log_dir)
        self._starts = 0

    @property
    def root_log_dir(self) -> str:
        return str(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        # The agent counts failures alone. It also starts all workers again if a host joins or leaves.
        attempt, self._starts = self._starts, self._starts + 1
        if attempt:
            failures, most = envs[0]["TORCHELASTIC_RESTART_COUNT"], envs[0]["TORCHELASTIC_MAX_RESTARTS"]
            text = f"farprop run: all workers are started again ({failures} of {most} times after a failure)"
            print(text, file=sys.stderr, flush=True)
        directory = self._directory / f"attempt{attempt}"
        directory.mkdir()
        found: tuple[dict[int, str], dict[int, str], dict[int, str]] = {}, {}, {}
        for local_rank, environment in envs.items():
            rank = int(environment["RANK"])
            for names, kind, shown_on in ((found[0], "stdout", sys.stdout), (found[1], "stderr", sys.stderr)):
                path = directory / f"{local_rank}.{kind}"
                os.mkfifo(path, 0o600)
                names[local_rank] = str(path)
                log = self._log(rank, attempt, kind)
                self._output.add(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), rank, shown_on, log)
            environment["TORCHELASTIC_ERROR_FILE"] = found[2][local_rank] = str(directory / f"{local_rank}.json")
        return LogsDest(found[0], found[1], {}, {}, found[2], "", "")

    def _log(self, rank: int, attempt: int, kind: str) -> Any:
        if self._logs is None:
            return None
        place = self._logs / f"attempt{attempt}"
        place.mkdir(parents=True, exist_ok=True)
        return open(place / f"worker{rank}.{kind}", "wb", buffering=0)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The first signal ends the workers, the second one kills them; yields a list of those that came."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        name = signal.Signals(number)
        if len(received) > 1:
            _kill_workers()
            return
        how = "Ctrl-C" if name is signal.SIGINT else name.name
        print(f"\nfarprop run: {how}: the workers are told to end; again kills them", file=sys.stderr, flush=True)
        raise SignalException(f"got {name.name}", name)

    # What is ignored stays so: under nohup the job goes on without its terminal.
    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_workers() -> None:
    """Kill the workers that live, with the processes that they have started."""
    for pid in _children():
        with suppress(OSError):
            if os.getsid(pid) == pid:  # each worker leads a session
                os.killpg(pid, signal.SIGKILL)


def _children() -> Iterator[int]:
    own = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                # The second field is the command's name in parentheses, and may contain anything.
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == own:
                    yield int(name)
