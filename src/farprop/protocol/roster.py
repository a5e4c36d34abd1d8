"""Who is in the job: what a worker publishes about itself, and what rank 0 makes of all of it.

Entries travel as JSON through the store, which nobody authenticates: they are read with suspicion and used only to
dial, and to find the devices of answers. Rules that hold here:

- Rank 0 judges all entries and publishes one verdict, so that every worker sees the same roster or the same error.
- Whatever text comes in, the outcome is a value or ``RendezvousError``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from farprop.errors import RendezvousError, UsageError
from farprop.ids import check_worker_name


@dataclass(frozen=True)
class Entry:
    """One worker: its name and rank, where it listens, and how it authenticates."""

    name: str
    rank: int
    world_size: int  # 0 in a group that workers join and leave
    instance: str  # random, tells a process from its successor under the same name
    tcp: tuple[str, int]
    unix: str  # abstract socket name, or "" when it listens on TCP alone
    net: str  # network namespace in which the abstract name is known
    host: str  # for people
    pid: int  # for people
    fingerprint: str  # equal on workers that have the same secret
    own_secret: bool  # found by itself, not given by FARPROP_SECRET
    # For each worker that it calls, which device there takes what is on a device here: {"w1": {"cuda:0": "cuda:1"}}
    device_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)  # those that it uses in calls; empty if it did not say
    cuda_devices: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Entry:
        try:
            fields = json.loads(text)
            fields["tcp"] = str(fields["tcp"][0]), int(fields["tcp"][1])
            entry = cls(**fields)
            check_worker_name(entry.name)
            if not isinstance(entry.rank, int) or not isinstance(entry.unix, str) or not _are_maps(entry.device_maps):
                raise TypeError("a field has the wrong type")
        except (ValueError, TypeError, KeyError, IndexError, UsageError) as error:
            raise RendezvousError(
                f"The store holds something else where a worker's entry should be ({error}). Do all workers run the "
                "same farprop, and is the store used by this job alone?"
            ) from error
        return entry


def _are_maps(given: object) -> bool:
    if not isinstance(given, dict) or not all(isinstance(device_map, dict) for device_map in given.values()):
        return False
    return all(isinstance(target, str) for device_map in given.values() for target in device_map.values())


def judge(entries: Sequence[Entry]) -> str | None:
    """What is wrong with these workers as one job, as a sentence that says what to do; None if nothing is."""
    for name, times in Counter(entry.name for entry in entries).items():
        if times > 1:
            where = ", ".join(f"rank {e.rank} on {e.host}" for e in entries if e.name == name)
            return f"Worker name {name!r} is not unique: {where} use it. Give each worker its own name in init_rpc."
    sizes = {entry.world_size for entry in entries}
    if len(sizes) > 1:
        said = ", ".join(f"{e.name} says {e.world_size}" for e in entries)
        return f"The workers do not agree on world_size: {said}. Pass the same world_size everywhere."
    return judge_secrets(entries)


def judge_secrets(entries: Sequence[Entry]) -> str | None:
    if len({entry.fingerprint for entry in entries}) <= 1:
        return None
    first = entries[0]
    other = next(e for e in entries if e.fingerprint != first.fingerprint)
    if first.own_secret and other.own_secret:
        return (
            f"{first.name} ({first.host}) and {other.name} ({other.host}) share no secret: they are on different "
            "hosts, or belong to different users. Set FARPROP_SECRET to the same long random text on every worker "
            '(for example the output of: python -c "import secrets; print(secrets.token_hex(32))"), or '
            "FARPROP_SECRET_FILE to a file that holds it. FARPROP_INSECURE=1 lets anyone who can reach the workers run "
            "code on them."
        )
    without = [e.name for e in (first, other) if e.own_secret]
    if without:
        return f"{without[0]} has no FARPROP_SECRET while other workers have one. Set the same on every worker."
    return (
        f"{first.name} and {other.name} have different secrets. Set FARPROP_SECRET (or FARPROP_SECRET_FILE, or "
        "FARPROP_INSECURE) to the same on every worker."
    )


def verdict_to_json(entries: Sequence[Entry], problem: str | None) -> str:
    return json.dumps({"problem": problem, "workers": [] if problem else [asdict(e) for e in entries]})


def verdict_from_json(text: str | bytes) -> list[Entry]:
    """The roster that rank 0 published; raises its reason if it refused."""
    try:
        verdict = json.loads(text)
        problem, workers = verdict["problem"], [json.dumps(worker) for worker in verdict["workers"]]
    except (ValueError, TypeError, KeyError) as error:
        raise RendezvousError(f"Rank 0 published something that is not a roster ({error}).") from error
    if problem:
        raise RendezvousError(str(problem))
    return [Entry.from_json(worker) for worker in workers]
