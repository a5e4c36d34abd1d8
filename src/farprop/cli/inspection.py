"""The commands that see into a job: ps, top, calls, refs, passes, stacks, why."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from farprop.cli.stacks import blocks_of, layout
from farprop.cli.tables import BOLD, RED, age, coloured, has_colours, printable, size, table
from farprop.errors import UsageError
from farprop.inspect.job import Job
from farprop.inspect.outside import find, list_jobs
from farprop.protocol.inspection import Silence, Snapshot
from farprop.protocol.waits import brief, busy_with, listed, short

_CLEAR = "\033[H\033[2J"


def add(commands: Any) -> None:
    """Add these commands to the parser."""
    _add(commands, "ps", _ps, "the workers of a job, and what each of them does")
    top = _add(commands, "top", _top, "the workers and the oldest calls, again and again")
    top.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="how often (default: 1)")
    top.add_argument("--count", type=int, default=0, metavar="N", help="end after so many times (default: never)")
    calls = _add(commands, "calls", _calls, "the calls that run, are queued or awaited, oldest first")
    calls.add_argument("--system", action="store_true", help="farprop's own calls, too")
    _add(commands, "refs", _refs, "remote references: to whose values, how large, who made them")
    _add(commands, "passes", _passes, "backward passes, and what each of them waits for")
    stacks = _add(commands, "stacks", _stacks, "the Python stacks of the workers' threads")
    stacks.add_argument("--worker", action="append", default=[], metavar="NAME", help="of this worker alone")
    stacks.add_argument("--all", action="store_true", help="also threads without work, and frames inside of farprop")
    _add(commands, "why", _why, "why calls have no answers, in a sentence each")


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], what: str) -> argparse.ArgumentParser:
    example = f"example:\n  farprop {name} train --json"
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=f"Show {what}.",
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", nargs="?", default="", metavar="JOB", help="name, beginning of the id, or job file")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--timeout", type=float, default=1.0, metavar="SECONDS", help="wait so long for a worker (default: 1)"
    )
    parser.set_defaults(run=run)
    return parser


def _found(arguments: argparse.Namespace, stacks: bool = False) -> Job:
    return find(arguments.job, arguments.timeout, stacks)


def _print_json(value: Any) -> None:
    json.dump(msgspec.to_builtins(value), sys.stdout, indent=1)
    print()


def _code(job: Job) -> int:
    """1 if a worker did not answer."""
    return int(any(isinstance(answer, Silence) for answer in job.workers))


# ps, top


def _ps(arguments: argparse.Namespace) -> int:
    if not arguments.job and len(names := list_jobs()) > 1:
        jobs = [find(name, arguments.timeout) for name in names]
    else:
        jobs = [_found(arguments)]
    if arguments.json:
        _print_json([job.to_builtins() for job in jobs])
    else:
        print("\n\n".join(map(_workers_text, jobs)))
    return max(map(_code, jobs))


def _workers_text(job: Job) -> str:
    rows = []
    for answer in job.workers:
        member = answer.member
        who = (answer.name, str(member.rank), str(member.pid), member.host)
        if isinstance(answer, Silence):
            rows.append((*who, "", "", "", "", "", "", "", brief(answer)))
            continue
        running = sum(call.state in ("running", "unfinished") and not call.system for call in answer.served)
        rows.append(
            (
                *who,
                age(time.time() - answer.started),
                str(running),
                str(answer.queued),
                str(sum(not call.system for call in answer.awaited)),
                f"{answer.threads_busy}/{answer.thread_limit}",
                size(answer.memory_bytes),
                size(answer.shared_bytes),
                brief(answer),
            )
        )
    head = ("WORKER", "RANK", "PID", "HOST", "AGE", "RUNS", "QUEUED", "AWAITS", "BUSY", "MEMORY", "SHARED", "DOES")
    return f"{coloured(f'job {job.name}', BOLD)} ({job.id}), {len(rows)} workers\n{table(head, rows)}"


def _top(arguments: argparse.Namespace) -> int:
    if not arguments.json and has_colours():
        try:
            from farprop.cli import top
        except ImportError:
            pass  # without rich there are no rates
        else:
            from farprop.dashboard.sources import Outside

            source = Outside(arguments.job, arguments.timeout)
            return int(not top.run(source, arguments.interval, arguments.count))
    shown = 0
    while True:
        job = _found(arguments)
        if arguments.json:
            _print_json(job.to_builtins())
        else:
            clear = _CLEAR if has_colours() else ""
            print(f"{clear}{_workers_text(job)}\n\n{_calls_text(job, system=False, most=20)}", flush=True)
        shown += 1
        if shown == arguments.count:
            return _code(job)
        time.sleep(arguments.interval)


# calls, refs, passes


def _calls(arguments: argparse.Namespace) -> int:
    job = _found(arguments)
    if arguments.json:
        _print_json(job.all_calls if arguments.system else job.calls)
    else:
        print(_calls_text(job, arguments.system))
        _print_silent(job)
    return _code(job)


def _calls_text(job: Job, system: bool, most: int | None = None) -> str:
    found = job.all_calls if system else job.calls
    rows = [
        (
            age(call.seconds),
            call.state,
            call.id,
            short(call.function),
            age(call.left) if call.left is not None else "none",
            "" if call.root == call.id else call.root,
            "" if call.context is None else str(call.context),
            call.place,
            call.thread,
        )
        for call in found[:most]
    ]
    if not rows:
        return "No calls."
    head = ("AGE", "STATE", "CALL", "FUNCTION", "LEFT", "PART OF", "CONTEXT", "AT", "THREAD")
    return table(head, rows)


def _refs(arguments: argparse.Namespace) -> int:
    job = _found(arguments)
    if arguments.json:
        _print_json([{"worker": worker, **msgspec.to_builtins(found)} for worker, found in job.references])
        return _code(job)
    rows = [
        (
            found.owner,
            size(found.nbytes) if found.role == "owner" else "",
            found.type,
            found.id,
            f"{found.role} {found.state}",
            listed(found.holders),
            found.made_by,
            found.created_at,
            age(found.seconds) if found.seconds else "",
        )
        for worker, found in job.references
    ]
    head = ("OWNER", "SIZE", "TYPE", "REFERENCE", "STATE", "HELD BY", "MADE BY", "CREATED AT", "AGE")
    print(table(head, rows) if rows else "No references.")
    _print_silent(job)
    return _code(job)


def _passes(arguments: argparse.Namespace) -> int:
    job = _found(arguments)
    if arguments.json:
        _print_json([{"worker": worker, **msgspec.to_builtins(found)} for worker, found in job.passes])
        return _code(job)
    rows = [
        (
            worker,
            str(found.context),
            f"{found.origin} #{found.number}",
            found.mode,
            age(found.seconds),
            str(found.missing),
            listed(found.partners),
            listed(map(str, found.waits_for)),
        )
        for worker, found in job.passes
    ]
    head = ("WORKER", "CONTEXT", "PASS", "MODE", "AGE", "MISSING", "PARTNERS", "WAITS FOR")
    print(table(head, rows) if rows else "No backward passes.")
    _print_silent(job)
    return _code(job)


def _print_silent(job: Job) -> None:
    for answer in job.workers:
        if isinstance(answer, Silence):
            print(coloured(f"{answer.name} {answer.reason}", RED))


# why


def _why(arguments: argparse.Namespace) -> int:
    job = _found(arguments)
    reasons = job.why()
    if arguments.json:
        _print_json(reasons)
        return _code(job)
    for reason in reasons:
        print(printable(reason.sentence))
    if not reasons:
        print("No call is waited for.")
        for sentence in job.doings().values():
            print(printable(f"  {sentence}"))
    for snapshot in job.snapshots:
        if snapshot.shutting_down is not None:
            print(printable(f"{snapshot.name} is in shutdown ({age(snapshot.shutting_down)})"), end="")
            print(printable(f", and waits for {listed(snapshot.barrier)}") if snapshot.barrier else "")
        if snapshot.queued:
            print(printable(f"{snapshot.name} has {snapshot.queued} calls in its queue: {busy_with(snapshot)}"))
    _print_silent(job)
    return _code(job)


# stacks


def _stacks(arguments: argparse.Namespace) -> int:
    job = _found(arguments, stacks=True)
    unknown = [name for name in arguments.worker if name not in job.answers]
    if unknown:
        raise UsageError(f"{unknown[0]} is not a worker of this job. Its workers: {listed(job.answers, 50)}.")
    answers = [answer for answer in job.workers if not arguments.worker or answer.name in arguments.worker]
    if arguments.json:
        _print_json(
            {
                answer.name: answer.threads if isinstance(answer, Snapshot) else {"silent": answer.reason}
                for answer in answers
            }
        )
        return _code(job)
    print(layout(blocks_of(job, answers, arguments.all)))
    return _code(job)
