"""Do the hosts of a job fit together? What each tells of itself, and the results of comparing: no stores, no sockets.

What hosts tell of themselves comes through the store before anybody has proved anything. It is decoded by a schema,
its texts are shown on one line without control codes, and nothing else is done with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Annotated, Any

import msgspec

from farprop.doctor.checks import is_loopback
from farprop.doctor.results import Result, Status, failure, ok, warning
from farprop.doctor.speed import Speed, rate_text, seconds_text
from farprop.errors import RendezvousError
from farprop.protocol.foreign_text import one_line
from farprop.protocol.json_decoding import decode

MOST_BYTES = 1 << 16  # of one value in the store
_MOST_CHARACTERS = 1000
_Text = Annotated[str, msgspec.Meta(max_length=4 * _MOST_CHARACTERS)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_SKEW_SECONDS = 1.0
_MUCH_SLOWER = 5.0
_FEW_PAIRS = 3  # fewer say nothing about what is usual


@dataclass(frozen=True)
class Host:
    """What the process of one rank tells of itself and its host."""

    rank: _Count
    world_size: _Count
    instance: _Text  # random
    host: _Text
    pid: _Count
    place: _Text  # equal for processes that share memory and have one clock
    address: _Text  # at which it listens
    farprop: _Text
    torch: _Text
    python: _Text
    cores: _Count
    threads: _Count
    restricted: bool
    tls: bool
    own_certificates: bool
    secret: _Text  # "given", "found", "none" or, if it can't be used, ""
    problems: Annotated[list[Result], msgspec.Meta(max_length=50)]  # what its own checks found

    @property
    def who(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True)
class Skew:
    """How far a clock is ahead of rank 0's, in seconds, and how wrong this may be."""

    ahead: float
    error: float


@dataclass(frozen=True)
class Pair:
    """What one rank found when it called another."""

    source: _Count
    target: _Count
    address: _Text
    name: _Text  # whether the target's host name leads to its address: "yes", "no" or "elsewhere"
    speed: Speed | None
    problem: _Text  # why it can't be called; empty if it can


def to_json(value: Host | Skew | Pair | Sequence[int]) -> str:
    return msgspec.json.encode(value).decode()


def from_json(text: bytes, kind: Any, what: str) -> Any:
    """Decode what another process wrote, by its schema, with texts that are safe to show.

    Args:
        text: what was in the store.
        kind: the type.
        what: for the error.

    Raises:
        RendezvousError: it makes no sense.
    """
    if len(text) > MOST_BYTES:
        raise RendezvousError(f"The store holds {len(text)} bytes where {what} should be. Who else can write to it?")
    try:
        return _cleaned(decode(text, kind))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RendezvousError(
            f"The store holds something else where {what} should be ({one_line(str(error), 200)}). Do all hosts run "
            "the same farprop, and is the store used by this job alone?"
        ) from error


def _cleaned(value: Any) -> Any:
    """The same, with texts that are safe to show."""
    if isinstance(value, str) and not isinstance(value, Status):
        return one_line(value, _MOST_CHARACTERS)
    if isinstance(value, list):
        return [_cleaned(one) for one in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{field.name: _cleaned(getattr(value, field.name)) for field in dataclasses.fields(value)}
        )
    return value


def ranks_text(ranks: Sequence[int]) -> str:
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# Checks


def missing(came: Iterable[Host], absent: Sequence[int], world_size: int, seconds: float) -> Result:
    """Ranks that have not come."""
    here = "; ".join(host.who for host in came)
    verb = "has" if len(absent) == 1 else "have"
    return failure(
        "hosts",
        f"{ranks_text(absent)} of {world_size} {verb} not come within {seconds:.0f} s. Those that came: {here}.",
        "Start `farprop doctor --store` there, too, with the same address and world size, and look whether that host "
        "can reach the store's port.",
    )


def compare(hosts: Sequence[Host]) -> list[Result]:
    """What all hosts have to have in common.

    Args:
        hosts: all of them, by rank.
    """
    places = len({host.place for host in hosts})
    found = [
        ok("hosts", f"all {len(hosts)} ranks came, from {places} host{'s' if places > 1 else ''}"),
        _same(hosts, "world size", lambda host: str(host.world_size), "Give the same --world-size to all."),
        _same(hosts, "farprop", lambda host: host.farprop, "Install the same version everywhere."),
        _alike(hosts, "torch", lambda host: host.torch.partition("+")[0], "Tensors and modules may not be understood."),
        _alike(
            hosts,
            "Python",
            lambda host: ".".join(host.python.split(".")[:2]),
            "Functions that are sent as code (lambdas, those of __main__) need the same Python on both sides.",
        ),
        _same(
            hosts,
            "restricted",
            lambda host: "on" if host.restricted else "off",
            "Set FARPROP_RESTRICTED=1 for all, or for none.",
        ),
        _same(hosts, "TLS", _tls_of, "Set FARPROP_TLS, and own certificates, for all ranks alike."),
        _addresses(hosts),
        _threads(hosts),
    ]
    return found


def _tls_of(host: Host) -> str:
    return ("on, own certificates" if host.own_certificates else "on") if host.tls else "off"


def _said(hosts: Sequence[Host], of: Any) -> dict[str, list[Host]]:
    said: dict[str, list[Host]] = {}
    for host in hosts:
        said.setdefault(of(host), []).append(host)
    return said


def _differ(said: Mapping[str, Sequence[Host]]) -> str:
    """Who says what; what the most say comes last, and without names."""
    groups = sorted(said.items(), key=lambda group: len(group[1]))
    texts = [f"{value} on {', '.join(host.who for host in hosts)}" for value, hosts in groups[:-1]]
    return "; ".join([*texts, f"{groups[-1][0]} on {_few(groups[-1][1])}"])


def _few(hosts: Sequence[Host]) -> str:
    return hosts[0].who if len(hosts) == 1 else f"the other {len(hosts)}"


def _same(hosts: Sequence[Host], name: str, of: Any, advice: str) -> Result:
    said = _said(hosts, of)
    return ok(name, f"{next(iter(said))} everywhere") if len(said) == 1 else failure(name, f"{_differ(said)}.", advice)


def _alike(hosts: Sequence[Host], name: str, of: Any, advice: str) -> Result:
    said = _said(hosts, of)
    return ok(name, f"{next(iter(said))} everywhere") if len(said) == 1 else warning(name, f"{_differ(said)}.", advice)


def _addresses(hosts: Sequence[Host]) -> Result:
    unreachable = [host for host in hosts if is_loopback(host.address)]
    if unreachable and len({host.place for host in hosts}) > 1:
        listed = ", ".join(f"{host.who} listens at {host.address}" for host in unreachable)
        return failure(
            "addresses",
            f"{listed}, where no other host reaches it.",
            "The store's address leads there: give its address in the network, not a name that /etc/hosts has as "
            "127.0.1.1. Or set FARPROP_INTERFACE.",
        )
    return ok("addresses", ", ".join(dict.fromkeys(host.address for host in hosts[:8])) + (", ..." * (len(hosts) > 8)))


def _threads(hosts: Sequence[Host]) -> Result:
    by_place = sorted(hosts, key=lambda host: host.place)
    for _, group in groupby(by_place, lambda host: host.place):
        together = list(group)
        threads = sum(host.threads for host in together)
        if threads > max(together[0].cores, len(together)):
            return warning(
                "threads",
                f"The {len(together)} workers of {together[0].host} use {threads} threads for operators, and it has "
                f"{together[0].cores} cores.",
                f"Set OMP_NUM_THREADS={max(1, together[0].cores // len(together))} there.",
            )
    return ok("threads", "not more than cores")


def problems(hosts: Iterable[Host]) -> list[Result]:
    """What the checks of the hosts themselves have found."""
    return [
        Result(found.name, found.status, f"{host.who}: {found.found}", found.advice)
        for host in hosts
        for found in host.problems
        if found.status is not Status.OK
    ]


def secrets(own: Host, hosts: Sequence[Host], strangers: Collection[int]) -> Result:
    """Do all have one secret?

    Args:
        own: this process.
        hosts: all, by rank.
        strangers: the ranks that have not proved that they have our secret.
    """
    others = [host for host in hosts if host.rank in strangers and host.rank != own.rank]
    if not others:
        return ok("secret", "the same on all" if own.secret != "none" else "none (FARPROP_INSECURE=1)")
    listed = ", ".join(host.who for host in others)
    advice = (
        "Set FARPROP_SECRET_FILE to a file with the same secret on every host, such as the output of: "
        'python -c "import secrets; print(secrets.token_hex(32))"'
    )
    without = [host for host in (own, *others) if host.secret in ("found", "none", "")]
    if own.secret == "found" and all(host.secret == "found" for host in others):
        return failure("secret", f"No secret is given, and {own.who} shares none with {listed}.", advice)
    if without:
        return failure("secret", f"{', '.join(host.who for host in without)}: no secret, and others have one.", advice)
    if len(others) > 1 and len(others) == len(hosts) - 1:
        return failure("secret", f"{own.who} has another secret than all others: {listed}.", advice)
    return failure("secret", f"{listed}: another secret than {own.who}.", advice)


def clocks(hosts: Sequence[Host], skews: Mapping[int, Skew]) -> Result:
    """Are the clocks of all hosts right, or at least the same?

    Args:
        hosts: all, by rank.
        skews: by rank, without rank 0.
    """
    texts = [
        f"{hosts[rank].who} is {seconds_text(abs(skew.ahead))} {'ahead' if skew.ahead > 0 else 'behind'}"
        for rank, skew in sorted(skews.items())
        if abs(skew.ahead) - skew.error > _SKEW_SECONDS
    ]
    error = seconds_text(max((skew.error for skew in skews.values()), default=0.0))
    if texts:
        return warning(
            "clocks",
            f"Compared with {hosts[0].who}: {', '.join(texts)} (measured to {error}).",
            "Keep the clocks right by NTP or chrony. Calls and deadlines don't need it; logs, traces and certificates "
            "do.",
        )
    silent = [host.who for host in hosts[1:] if host.rank not in skews]
    if silent:
        return warning("clocks", f"{', '.join(silent)} did not tell the time.", "Look at what it wrote, and try again.")
    most = seconds_text(max((abs(skew.ahead) for skew in skews.values()), default=0.0))
    return ok("clocks", f"within {most} of rank 0's, measured to {error}")


def pairs(hosts: Sequence[Host], found: Sequence[Pair]) -> list[Result]:
    """Can all call all, and is one way much slower than the others?"""
    results = [
        failure(
            "calls",
            f"{hosts[pair.source].who} can't call {hosts[pair.target].who} at {pair.address}: {pair.problem}",
            "If nothing answers there, a firewall may be between them: set FARPROP_PORT_RANGE to ports that it lets "
            "through, or FARPROP_INTERFACE to another network.",
        )
        for pair in found
        if pair.problem
    ]
    wanted = len(hosts) * (len(hosts) - 1)
    if len(found) < wanted:
        silent = sorted({host.rank for host in hosts} - {pair.source for pair in found})
        who = ", ".join(hosts[rank].who for rank in silent) or "some ranks"
        results.append(failure("calls", f"{wanted - len(found)} of {wanted} pairs have no result: {who} did not end."))
    speeds = [(pair, pair.speed) for pair in found if pair.speed is not None]
    for transport in sorted({speed.transport for _, speed in speeds}):
        results += _slow_ones(hosts, [one for one in speeds if one[1].transport == transport])
    if not results:
        slowest = seconds_text(max(speed.call for _, speed in speeds))
        least = rate_text(min(speed.rate for _, speed in speeds))
        return [ok("calls", f"all {wanted} pairs: a call takes {slowest} at most, 10 MB arrive at {least} or more")]
    return results


def _slow_ones(hosts: Sequence[Host], speeds: Sequence[tuple[Pair, Speed]]) -> list[Result]:
    if len(speeds) < _FEW_PAIRS:
        return []
    usual_call = median(speed.call for _, speed in speeds)
    usual_rate = median(speed.rate for _, speed in speeds)
    usual = f"{seconds_text(usual_call)} and {rate_text(usual_rate)}"
    return [
        warning(
            "calls",
            f"From {hosts[pair.source].who} to {hosts[pair.target].who} a call takes {seconds_text(speed.call)} and "
            f"10 MB arrive at {rate_text(speed.rate)}. Usual are {usual}.",
            "Look at the network between the two, and at what else runs there.",
        )
        for pair, speed in speeds
        if speed.call > _MUCH_SLOWER * usual_call or speed.rate < usual_rate / _MUCH_SLOWER
    ]


def names(hosts: Sequence[Host], found: Sequence[Pair]) -> Result:
    """Do the hosts know each other's names? Farprop needs addresses alone; ``MASTER_ADDR`` may be a name."""
    wrong = [
        f"{hosts[pair.target].host} {'does not resolve' if pair.name == 'no' else 'leads elsewhere'} on "
        f"{hosts[pair.source].who}"
        for pair in found
        if pair.name != "yes"
    ]
    if not wrong:
        return ok("names", "every host resolves the names of the others")
    more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return ok("names", f"{', '.join(wrong[:3])}{more}: fine, unless MASTER_ADDR is such a name")
