"""Is something wrong with this host? Facts in, results out: nothing is looked up here."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Sequence

from farprop.config import GIB, MIB
from farprop.doctor.facts import Clock, Cores, Files, Memory, Network, Ports, Secrecy, Tls, Variables, Versions
from farprop.doctor.results import Result, failure, ok, warning
from farprop.doctor.speed import Speed, rate_text, seconds_text

# Of one host: a connection in each direction, each with a socket beside it that passes shared memory.
DESCRIPTORS_A_WORKER = 4
_SPARE_DESCRIPTORS = 64  # of Python, torch and the program
_FEW_DAYS = 7 * 24 * 3600.0
_SLOW_CALL = 0.005  # seconds; a hundred times what it takes
_DOCKERS_DEV_SHM = 64 * MIB


def versions(facts: Versions) -> Result:
    found = f"farprop {facts.farprop}, torch {facts.torch}, Python {facts.python}"
    if facts.missing:
        features = "; ".join(dict.fromkeys(facts.missing.values()))
        names = ", ".join(facts.missing)
        return warning(
            "versions",
            f"{found}. This torch lacks {names}. Without them these are off, or slower: {features}.",
            "Use a torch that farprop was tried with: see docs/torch_versions.md.",
        )
    if not facts.is_tried:
        return warning(
            "versions",
            f"{found}. Farprop was not tried with this torch, but it has all names that farprop uses.",
            "See docs/torch_versions.md.",
        )
    return ok("versions", found)


def variables(facts: Variables) -> Result:
    if facts.problem:
        return failure("settings", facts.problem, "Without this, no worker starts here.")
    unknown = sorted(facts.given - facts.known)
    texts, is_misspelt = [], False
    for name in unknown:
        meant = difflib.get_close_matches(name, sorted(facts.known), 1, 0.8)
        is_misspelt |= bool(meant)
        texts.append(f"{name} (do you mean {meant[0]}?)" if meant else name)
    if unknown:
        found = f"Farprop does not know {', '.join(texts)}, and ignores it."
        advice = "Correct the name, or remove the variable: docs/settings.md lists all settings."
        return failure("settings", found, advice) if is_misspelt else warning("settings", found, advice)
    given = ", ".join(sorted(facts.given & facts.known))
    return ok("settings", f"{given}" if given else "no FARPROP_ variable is set: all defaults")


def cores(facts: Cores) -> Result:
    usable = facts.cores if facts.quota is None else min(facts.cores, facts.quota)
    found = f"{facts.cores}"
    if facts.quota is not None and facts.quota < facts.cores:
        found += f", of which the control group may use {facts.quota:g}"
    given = facts.omp_num_threads
    if given is not None and not given.replace(",", "").isdigit():
        return failure("cores", f"{found}. OMP_NUM_THREADS={given!r} is no number.", "Set it to a number.")
    threads = f"a worker uses {facts.threads} threads for an operator"
    threads += " (OMP_NUM_THREADS is not set)" if given is None else f" (OMP_NUM_THREADS={given})"
    if facts.threads > usable and facts.threads > 1:
        return warning(
            "cores",
            f"{found}; {threads}: they take the cores from each other.",
            f"Set OMP_NUM_THREADS to {max(1, int(usable))} divided by the number of workers of this host.",
        )
    return ok("cores", f"{found}; {threads}")


def network(facts: Network) -> Result:
    if facts.problem:
        return failure("network", facts.problem)
    if facts.interface is not None and is_loopback(facts.address):
        return warning(
            "network",
            f"FARPROP_INTERFACE={facts.interface} is {facts.address}: only workers of this host can reach it.",
            "For a job of several hosts, name the interface of the network between them.",
        )
    if is_loopback(facts.address):
        return ok("network", f"{facts.host} is in no network: jobs of this host alone can run")
    found = f"{facts.host} has the address {facts.address}"
    instead = f"Name rank 0's host to other hosts by its address (MASTER_ADDR={facts.address}), or correct"
    if not facts.resolved:
        return warning("network", f"{found}, and its name does not resolve here.", f"{instead} /etc/hosts or DNS.")
    if all(map(is_loopback, facts.resolved)):
        return warning(
            "network",
            f"{found}, but its name resolves to {facts.resolved[0]} here: as MASTER_ADDR, the name would make rank 0 "
            "listen where no other host reaches it.",
            f"{instead} /etc/hosts.",
        )
    return ok("network", f"{found}; its name resolves to {', '.join(facts.resolved)}")


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def ports(facts: Ports) -> Result:
    if facts.wanted is None:
        if facts.free:
            return ok("ports", "any free one (FARPROP_PORT_RANGE is not set)")
        return failure("ports", facts.problem)
    found = f"{facts.free} of {facts.tried} are free in FARPROP_PORT_RANGE={facts.wanted[0]}-{facts.wanted[1]}"
    if facts.free == 0:
        return failure("ports", f"{found}. {facts.problem}")
    return ok("ports", f"{found}; each worker needs one")


def memory(facts: Memory) -> Result:
    found = f"{_size(facts.available)} of memory are available"
    if facts.dev_shm is not None:
        found += f"; /dev/shm has {_size(facts.dev_shm[0])}, {_size(facts.dev_shm[1])} free (farprop does not use it)"
    if facts.problem:
        return warning(
            "memory",
            f"No shared memory of 10 MB can be made: {facts.problem}. Tensors go through sockets, which is slower. "
            f"{found}.",
            "Look at `ulimit -f` and `ulimit -v`, and at the limits of the container.",
        )
    if facts.available < GIB:
        return warning(
            "memory",
            f"{found}.",
            "Tensors on their way to workers of the same host need shared memory, which counts as memory. A worker "
            "may be killed.",
        )
    if facts.dev_shm is not None and facts.dev_shm[0] <= _DOCKERS_DEV_SHM:
        return warning(
            "memory",
            f"{found}.",
            "Workers of torch's DataLoader put their batches there, and die without room. Start the container with "
            "more, such as: docker run --shm-size 2g",
        )
    return ok("memory", found)


def secrecy(facts: Secrecy) -> Result:
    if facts.problem:
        return failure("secret", facts.problem)
    if facts.source and (facts.is_given_twice or facts.insecure):
        other = "FARPROP_SECRET_FILE" if facts.is_given_twice else "FARPROP_INSECURE"
        return warning("secret", f"{facts.source} is used, and {other} has no effect.", "Unset one of them.")
    if facts.source:
        return ok("secret", f"given by {facts.source}, and long enough")
    if facts.insecure:
        return warning(
            "secret",
            "FARPROP_INSECURE=1: whoever can reach a worker can run code on this host.",
            "Set FARPROP_SECRET_FILE instead.",
        )
    return ok("secret", "none given: workers of this host find one; a job of several hosts needs FARPROP_SECRET_FILE")


def tls(facts: Tls) -> Result:
    if not facts.is_on:
        unused = " FARPROP_TLS_CERT has no effect." if facts.certificate else ""
        return warning(
            "TLS",
            f"FARPROP_TLS=0: whoever can read the network between hosts can read all tensors.{unused}",
            "Unset FARPROP_TLS, unless something else encrypts that network.",
        )
    if facts.certificate is None:
        return ok("TLS", "on, with a certificate that each worker makes for itself")
    if facts.problem:
        ended = " It has expired." if facts.valid_seconds < 0 else ""
        return failure(
            "TLS",
            f"With the certificate {facts.certificate} no connection can be made: {facts.problem}.{ended}",
            "Look at FARPROP_TLS_CERT, FARPROP_TLS_KEY and FARPROP_TLS_CA: the key must be that of the certificate, "
            "which must be signed by the CA and valid now.",
        )
    days = int(facts.valid_seconds // 86400)
    if facts.valid_seconds < _FEW_DAYS:
        return warning("TLS", f"The certificate {facts.certificate} ends in {days} days.", "Renew it.")
    return ok("TLS", f"on, with {facts.certificate}, valid for {days} days")


def files(facts: Files, workers: int = 2) -> Result:
    needed = facts.opened + _SPARE_DESCRIPTORS + DESCRIPTORS_A_WORKER * (workers - 1)
    enough_for = (facts.limit - facts.opened - _SPARE_DESCRIPTORS) // DESCRIPTORS_A_WORKER
    found = f"a process may open {facts.limit} files"
    if facts.limit < needed:
        most = f" (at most {facts.hard_limit} here)" if facts.hard_limit >= needed else ", as root, in limits.conf"
        return failure("files", f"{found}, and a worker of this job needs {needed}.", f"ulimit -n {needed}{most}")
    return ok("files", f"{found}: enough for about {enough_for} workers")


def clock(facts: Clock) -> Result:
    if facts.now < facts.installed:
        return warning(
            "clock",
            f"It is behind: farprop was installed {seconds_text(facts.installed - facts.now)} later than now.",
            "Set the clock, for example by NTP: logs and traces of several hosts need it, and so do certificates.",
        )
    return ok("clock", "later than the installation of farprop")


def calls(speeds: Sequence[Speed], problem: str = "", busy: float = 0.0, cores: int = 1) -> list[Result]:
    """The calls between two workers that were started for it.

    Args:
        speeds: of the calls that could be made.
        problem: why no further ones could be made; empty if all could.
        busy: how many cores other programs kept busy meanwhile.
        cores: of how many.
    """
    found = []
    for speed in speeds:
        text = (
            f"{speed.transport}: a call takes {seconds_text(speed.call)} (p99 {seconds_text(speed.call_p99)}), "
            f"10 MB arrive at {rate_text(speed.rate)}"
        )
        if speed.call > _SLOW_CALL:
            advice = f"{busy:.1f} of {cores} cores are busy with other work. Try again when the machine is idle."
            found.append(warning("calls", text, advice))
        else:
            found.append(ok("calls", text))
    if problem:
        found.append(failure("calls", f"Two workers that were started to try can't call each other: {problem}"))
    return found


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
