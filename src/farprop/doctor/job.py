"""``farprop doctor --store``: all hosts of a job, before it starts.

The ranks meet in the job's store, which rank 0 opens. Each tells of itself; nothing of this is trusted
(``job_checks.py``). Who has the job's secret proves it by a signature, which does not reveal it. If all have come and
share the secret, they join as workers do, and each calls every other one.

| key | who writes it | what |
| --- | --- | --- |
| ``host/R`` | rank R | what it tells of itself |
| ``proof/R`` | rank R | the same, signed; empty if it has no secret to sign with |
| ``absent`` | rank 0 | the ranks that have not come in time |
| ``ask/R/N``, ``clock/R/N`` | rank R, rank 0 | question and answer: rank 0's clock |
| ``skew/R`` | rank R | how far its clock is ahead |
| ``joins`` | rank 0 | whether all are to join |
| ``pair/R/S`` | rank R | what it found when it called rank S, signed |
| ``done`` | all | a counter: who does not need the others any more |
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

import farprop
import farprop.rpc as rpc
from farprop.config import Settings
from farprop.doctor import facts, job_checks
from farprop.doctor.job_checks import Host, Pair, Skew, from_json, to_json
from farprop.doctor.results import Result, Status, failure, has_failed
from farprop.doctor.speed import measure, transport_to
from farprop.errors import FarpropError, RendezvousError, UsageError
from farprop.protocol.signing import Keys, Unsigned
from farprop.rpc import store as stores
from farprop.runtime import rendezvous
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.rendezvous import CheckedStore, wait_until
from farprop.runtime.secret import Secret, find_secret
from farprop.transport import sockets

_PLANE = "doctor"
_QUESTIONS = 8
_CLOCK_SECONDS = 10.0
_PAIR_SECONDS = 60.0
_LEAVE_SECONDS = 5.0
_PATIENCE = 5.0  # how much longer than rank 0 the others wait
_SILENT_SECONDS = 2.0


@dataclass(frozen=True)
class Report:
    """What this rank knows in the end; rank 0 knows all pairs."""

    hosts: list[Host]
    pairs: list[Pair]
    results: list[Result]


def parse_address(text: str) -> tuple[str, int]:
    """The host and port of a store.

    Raises:
        UsageError: it has none.
    """
    try:
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise UsageError(f"--store {text!r} is no address: write HOST:PORT, such as node1:29500.")


def examine(
    address: tuple[str, int], rank: int, world_size: int, timeout: float, own: list[Result], settings: Settings
) -> Report:
    """Take part, as one rank.

    Args:
        address: of the store.
        rank: of this process.
        world_size: how many ranks there are.
        timeout: how many seconds to wait for the others.
        own: the results of the checks of this host.
        settings: of this process.

    Raises:
        RendezvousError: the store can't be reached, the rank is taken, or rank 0 is gone.
        UsageError: the rank is none.
    """
    if not 0 <= rank < world_size:
        raise UsageError(f"--rank {rank} must be from 0 to --world-size - 1 = {world_size - 1}.")
    host, port = address
    if not facts.addresses_of(host):
        raise RendezvousError(f"The name of the store's host, {host}, does not resolve here. Give its address instead.")
    url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    store, _, _ = stores.open_store(url, rank, world_size, None, timeout)
    return _Examination(dist.PrefixStore("farprop_doctor", store), host, rank, world_size, timeout, settings).run(own)


class _Examination:
    def __init__(
        self, store: dist.Store, store_host: str, rank: int, world_size: int, timeout: float, settings: Settings
    ) -> None:
        self._given = store
        self._store = CheckedStore(store)
        self._store_host = store_host
        self._rank, self._size, self._timeout = rank, world_size, timeout
        self._settings = settings
        self._others = [other for other in range(world_size) if other != rank]

    def run(self, own: list[Result]) -> Report:
        secret: Secret | None = None
        own = [result for result in own if result.status is not Status.OK]
        try:
            job = rendezvous.job_of(self._given)
            try:
                secret = find_secret(self._settings, job, partial(rendezvous.agree, self._given))
            except UsageError as error:
                if not has_failed(own):
                    own.append(failure("secret", str(error)))
            keys = None if secret is None else Keys(secret.key, job, _PLANE)
            return self._meet(self._own_host(secret, own), keys)
        finally:
            if secret is not None:
                secret.let_go()

    def _own_host(self, secret: Secret | None, own: list[Result]) -> Host:
        settings = self._settings
        if secret is None:
            kind = ""
        elif secret.was_found:
            kind = "found"
        else:
            kind = "given" if settings.secret or settings.secret_file else "none"
        return Host(
            rank=self._rank,
            world_size=self._size,
            instance=secrets.token_hex(8),
            host=socket.gethostname(),
            pid=os.getpid(),
            place=sockets.network_namespace(),
            address=facts.network(settings, self._store_host).address,
            farprop=farprop.__version__,
            torch=str(torch.__version__),
            python=platform.python_version(),
            cores=len(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
            restricted=settings.restricted,
            tls=settings.tls,
            own_certificates=settings.tls_files is not None,
            secret=kind,
            problems=own,
        )

    # Meeting

    def _meet(self, own: Host, keys: Keys | None) -> Report:
        text = to_json(own)
        found = self._store.set_first(f"host/{self._rank}", text)
        if found != text.encode():
            holder: Host = from_json(found, Host, f"host/{self._rank}")
            raise RendezvousError(f"Rank {self._rank} is taken by a process on {holder.host} (pid {holder.pid}).")
        proof = f"proof/{self._rank}"
        self._store.set(proof, "none" if keys is None else keys.sign(proof, text))
        absent = self._absent()
        hosts = [self._host(rank) for rank in range(self._size) if rank not in absent]
        strangers = {host.rank for host in hosts if not self._has_proved(host.rank, keys)}
        results = [*job_checks.problems(hosts), job_checks.secrets(own, hosts, strangers)]
        if absent:
            self._leave()
            return Report(hosts, [], [job_checks.missing(hosts, absent, self._size, self._timeout), *results])
        results = job_checks.compare(hosts) + results
        skews = self._compare_clocks()
        if self._rank == 0:
            results.append(job_checks.clocks(hosts, skews))
        pairs, more = self._join(hosts, keys, results)
        self._leave()
        return Report(hosts, pairs, results + more)

    def _absent(self) -> list[int]:
        """The ranks that have not come in time, as rank 0 sees it."""
        end = time.monotonic() + self._timeout
        if self._rank == 0:
            wanted = [f"proof/{rank}" for rank in range(self._size)]
            soon = min(end, time.monotonic() + _SILENT_SECONDS)
            if not wait_until(lambda: self._store.has(wanted), soon):
                late = job_checks.ranks_text([rank for rank in self._others if not self._store.has([f"proof/{rank}"])])
                print(f"{late} not here yet. Waiting for up to {self._timeout:.0f} s.", file=sys.stderr, flush=True)
                wait_until(lambda: self._store.has(wanted), end)
            absent = [rank for rank in range(self._size) if not self._store.has([f"proof/{rank}"])]
            self._store.set("absent", to_json(absent))
            return absent
        self._await("absent", end + _PATIENCE)
        absent = from_json(self._store.get("absent"), list[int], "absent")
        return [rank for rank in self._others if rank in absent]

    def _await(self, key: str, end: float) -> None:
        if not wait_until(lambda: self._store.has([key]), end):
            raise RendezvousError(f"Rank 0 has not answered ({key!r} is not in the store): it has ended, or hangs.")

    def _host(self, rank: int) -> Host:
        found: Host = from_json(self._store.get(f"host/{rank}"), Host, f"host/{rank}")
        if found.rank != rank:
            raise RendezvousError(f"'host/{rank}' in the store is that of rank {found.rank}. Who else can write to it?")
        return found

    def _has_proved(self, rank: int, keys: Keys | None) -> bool:
        name = f"proof/{rank}"
        try:
            return keys is not None and keys.read(name, self._store.get(name)) == self._store.get(f"host/{rank}")
        except Unsigned:
            return False

    # Clocks

    def _compare_clocks(self) -> dict[int, Skew]:
        """How far the clocks of the others are ahead, on rank 0; on the others nothing."""
        end = time.monotonic() + _CLOCK_SECONDS
        if self._rank == 0:
            self._tell_time(end)
            found = {rank: self._skew(rank) for rank in self._others}
            return {rank: skew for rank, skew in found.items() if skew is not None}
        self._store.set(f"skew/{self._rank}", to_json(self._ask_time(end)))
        return {}

    def _skew(self, rank: int) -> Skew | None:
        name = f"skew/{rank}"
        try:
            found: Skew = from_json(self._store.get(name), Skew, name)
            return found
        except RendezvousError:
            return None  # it has not told, or told nonsense

    def _tell_time(self, end: float) -> None:
        """Answer the questions of the others, until all have told their skew."""
        asked = dict.fromkeys(self._others, 0)
        while asked and time.monotonic() < end:
            for rank, number in list(asked.items()):
                if self._store.has([f"ask/{rank}/{number}"]):
                    self._store.set(f"clock/{rank}/{number}", repr(time.time()))
                    asked[rank] += 1
                elif self._store.has([f"skew/{rank}"]):
                    del asked[rank]
            time.sleep(0.0002)

    def _ask_time(self, end: float) -> Skew:
        """Rank 0's clock was read between question and answer: half of the time between them bounds the error."""
        best = Skew(0.0, float(_CLOCK_SECONDS))
        for number in range(_QUESTIONS):
            question, answer = f"ask/{self._rank}/{number}", f"clock/{self._rank}/{number}"
            began, here = time.perf_counter(), time.time()
            self._store.set(question, "")
            while not self._store.has([answer]):
                if time.monotonic() > end:
                    return best
            error = (time.perf_counter() - began) / 2
            there: float = from_json(self._store.get(answer), float, answer)
            if error < best.error:
                best = Skew(here + error - there, error)
        return best

    # Calls

    def _join(self, hosts: list[Host], keys: Keys | None, results: list[Result]) -> tuple[list[Pair], list[Result]]:
        """Join, and call all others; nothing is tried if it is known that it would fail."""
        if self._rank == 0:
            self._store.set("joins", to_json([] if has_failed(results) or keys is None else [1]))
        self._await("joins", time.monotonic() + _CLOCK_SECONDS + _PATIENCE)
        if not from_json(self._store.get("joins"), list[int], "joins") or keys is None:
            return [], []
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=self._timeout, init_method=self._given)
        try:
            rpc.init_rpc(f"rank{self._rank}", rank=self._rank, world_size=self._size, rpc_backend_options=options)
        except FarpropError as error:
            return [], [failure("joining", str(error))]
        try:
            for a, b in _rounds(self._rank, self._size):
                self._measure_pair(a, b, hosts, keys)
            self._store.count("done", 1)
            end = time.monotonic() + _PAIR_SECONDS
            wait_until(lambda: self._store.count("done") >= self._size, end)
        finally:
            rpc.shutdown(graceful=False)
        ranks = range(self._size) if self._rank == 0 else [self._rank]
        names = [(a, b) for a in ranks for b in range(self._size) if a != b]
        pairs = [self._pair(a, b, keys) for a, b in names if self._store.has([f"pair/{a}/{b}"])]
        if self._rank == 0:
            return pairs, [*job_checks.pairs(hosts, pairs), job_checks.names(hosts, pairs)]
        return pairs, [result for result in job_checks.pairs(hosts, pairs) if any(pair.problem for pair in pairs)]

    def _measure_pair(self, first: int, second: int, hosts: list[Host], keys: Keys) -> None:
        """Call each other, one after the other: at the same time both would be slower."""
        other = second if self._rank == first else first
        if self._rank == first:
            self._measure(other, hosts, keys)
        if not wait_until(lambda: self._store.has([f"pair/{other}/{self._rank}"]), time.monotonic() + _PAIR_SECONDS):
            return
        if self._rank == second:
            self._measure(other, hosts, keys)

    def _measure(self, other: int, hosts: list[Host], keys: Keys) -> None:
        to = f"rank{other}"
        entry = current_agent().membership.find(to)
        assert entry is not None
        address = "{}:{}".format(*entry.tcp)
        resolved = facts.addresses_of(hosts[other].host)
        name = "yes" if entry.tcp[0] in resolved else "elsewhere" if resolved else "no"
        try:
            pair = Pair(self._rank, other, address, name, measure(to, transport_to(to)), "")
        except FarpropError as error:
            pair = Pair(self._rank, other, address, name, None, str(error)[:1000])
        key = f"pair/{self._rank}/{other}"
        self._store.set(key, keys.sign(key, to_json(pair)))

    def _pair(self, source: int, target: int, keys: Keys) -> Pair:
        key = f"pair/{source}/{target}"
        found: Pair = from_json(keys.read(key, self._store.get(key)), Pair, key)
        return found

    def _leave(self) -> None:
        """Rank 0 has the store's server: it stays until all have read what they need."""
        self._store.count("left", 1)
        if self._rank == 0:
            here = sum(self._store.has([f"proof/{rank}"]) for rank in range(self._size))
            wait_until(lambda: self._store.count("left") >= here, time.monotonic() + _LEAVE_SECONDS)


def _rounds(rank: int, size: int) -> list[tuple[int, int]]:
    """The pairs of this rank, in an order in which all ranks are busy at a time, as in a tournament."""
    seats: list[int | None] = list(range(size))
    if size % 2:
        seats.append(None)
    found = []
    for _ in range(len(seats) - 1):
        opposite = seats[len(seats) - 1 - seats.index(rank)]
        if opposite is not None:
            found.append((min(rank, opposite), max(rank, opposite)))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found
