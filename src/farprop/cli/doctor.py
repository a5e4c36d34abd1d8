"""The command ``doctor``: what is wrong with this host, or between the hosts of a job, and what to do."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from farprop.cli.tables import BOLD, GREEN, RED, YELLOW, coloured, table
from farprop.config import Settings
from farprop.errors import UsageError

if TYPE_CHECKING:
    from farprop.doctor.job import Report
    from farprop.doctor.results import Result

_COLOURS = {"ok": (GREEN,), "warning": (YELLOW,), "failure": (RED, BOLD)}
_MOST_PAIRS = 30
_EPILOG = """\
With --store, run it on all hosts of a job, as you would start the job: rank 0
opens the store, all ranks join and call each other, and rank 0 shows what was
found. Rank and size may come from srun, mpirun or torchrun; so may the address,
if --store is given without one.

exit codes: 0 all is well, or there are warnings; 1 a failure; 2 wrong usage

examples:
  farprop doctor
  farprop doctor --json
  farprop doctor --store node1:29500 --rank 0 --world-size 2     on node1
  farprop doctor --store node1:29500 --rank 1 --world-size 2     on node2
  srun farprop doctor --store
"""


def add(commands: Any) -> None:
    """Add this command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="what is wrong with this host, or between hosts",
        description="Check this host, or with --store all hosts of a job: what is wrong, and\nwhat to do.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--store", nargs="?", const="", metavar="HOST:PORT", help="check all hosts of a job")
    parser.add_argument("--rank", type=int, metavar="R", help="of this process (default: the launcher's)")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="how many ranks there are (default: the launcher's)"
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="wait so long for others (60)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.store is None and (arguments.rank is not None or arguments.world_size is not None):
        raise UsageError("--rank and --world-size need --store HOST:PORT, the address that rank 0 opens.")
    return _check_host(arguments) if arguments.store is None else _check_job(arguments)


def _check_host(arguments: argparse.Namespace) -> int:
    from farprop.doctor.local import check_host, try_calls
    from farprop.doctor.results import has_failed

    results, settings = check_host()
    if not arguments.json:
        _print_results(results)
    if settings is not None and not has_failed(results):
        calls = try_calls(settings)
        if not arguments.json:
            _print_results(calls)
        results += calls
    if arguments.json:
        _print_json({"ok": not has_failed(results), "checks": results})
    else:
        print(_summary(results))
    return int(has_failed(results))


def _check_job(arguments: argparse.Namespace) -> int:
    from farprop.doctor.job import examine, parse_address
    from farprop.doctor.local import check_host
    from farprop.doctor.results import has_failed

    rank, world_size, store = _place(arguments)
    address = parse_address(store)
    own, settings = check_host(world_size, address[0])
    # With invalid settings this rank does not join, but the others hear why.
    report = examine(address, rank, world_size, arguments.timeout, own, settings or Settings())
    if arguments.json:
        is_ok = not has_failed(report.results)
        _print_json({"ok": is_ok, "rank": rank, "hosts": report.hosts, "pairs": report.pairs, "checks": report.results})
    elif rank == 0:
        _print_report(report)
    elif has_failed(report.results):
        _print_results([result for result in report.results if result.status == "failure"])
    else:
        print(f"Rank {rank} is done. Rank 0 shows what was found.")
    return int(has_failed(report.results))


def _place(arguments: argparse.Namespace) -> tuple[int, int, str]:
    """The rank, the number of ranks and the store's address: as given, else as the launcher says."""
    from farprop.rpc.launchers import launched

    found = launched()
    rank, world_size, store = arguments.rank, arguments.world_size, arguments.store
    if found is None and (rank is None or world_size is None or not store):
        raise UsageError(
            "No launcher has started this process, so --store HOST:PORT, --rank and --world-size are all needed. "
            "srun, mpirun and torchrun say them."
        )
    if found is not None:
        rank = found.rank if rank is None else rank
        world_size = found.world_size if world_size is None else world_size
        if not store:
            host, port = found.address()
            store = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return rank, world_size, store


def _print_json(value: Any) -> None:
    print(json.dumps(msgspec.to_builtins(value), indent=1))


def _print_results(results: Sequence[Result]) -> None:
    for result in results:
        print(_text(result), flush=True)


def _text(result: Result) -> str:
    """The result as lines of the terminal's width; continued ones are indented."""
    head = f"{result.status:<8} {result.name:<10} "
    indent = " " * len(head)
    width = max(50, min(120, shutil.get_terminal_size().columns))
    wrapper = textwrap.TextWrapper(width - len(head), break_on_hyphens=False, break_long_words=False)
    lines = wrapper.wrap(result.found) or [""]
    if result.advice:
        wrapper.initial_indent, wrapper.subsequent_indent = "-> ", "   "
        lines += wrapper.wrap(result.advice)
    status = coloured(f"{result.status:<8}", *_COLOURS[result.status])
    return "\n".join([f"{status} {result.name:<10} {lines[0]}", *(f"{indent}{line}" for line in lines[1:])])


def _summary(results: Sequence[Result]) -> str:
    counts = {status: sum(result.status == status for result in results) for status in _COLOURS}
    worst = "failure" if counts["failure"] else "warning" if counts["warning"] else "ok"
    text = f"{len(results)} checks: {', '.join(_counted(counts[status], status) for status in counts)}"
    return coloured(text, *_COLOURS[worst])


def _counted(count: int, status: str) -> str:
    return f"{count} {status}" if count == 1 or status == "ok" else f"{count} {status}s"


def _print_report(report: Report) -> None:
    from farprop.doctor.speed import rate_text, seconds_text

    rows = []
    for pair in sorted(report.pairs, key=lambda one: -one.speed.call if one.speed else float("-inf"))[:_MOST_PAIRS]:
        hosts = f"{report.hosts[pair.source].host} -> {report.hosts[pair.target].host}"
        ends = (f"{pair.source} -> {pair.target}", hosts)
        speed = pair.speed
        if speed is None:
            rows.append((*ends, "FAILED", "", "", "", pair.name))
        else:
            times = (seconds_text(speed.call), seconds_text(speed.call_p99), rate_text(speed.rate))
            rows.append((*ends, speed.transport, *times, pair.name))
    if rows:
        if len(report.pairs) > len(rows):
            print(f"The slowest {len(rows)} of {len(report.pairs)} pairs (--json has all):")
        else:
            rows.sort(key=lambda row: [int(end) for end in row[0].split(" -> ")])
        print(table(("RANKS", "HOSTS", "BY", "CALL", "P99", "10 MB", "NAME"), rows))
        print()
    _print_results(report.results)
    print(_summary(report.results))
