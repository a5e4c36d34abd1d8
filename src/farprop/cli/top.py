"""The command ``top`` on a terminal, by rich (the extra ``top``): the live page in text."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from farprop.cli.tables import age, size
from farprop.dashboard.picture import Picture, State, WorkerCard
from farprop.dashboard.rates import Rate
from farprop.dashboard.sources import JobEnded, Source
from farprop.protocol.waits import short

_MOST_REASONS = 5
_MOST_ERRORS = 5
_WIDE = 120  # a terminal with fewer columns has no room for all figures
_ALWAYS = ("SERVED/s", "p99", "MADE/s", "BUSY")
_BESIDE_TABLES = 12  # lines of a screen that are neither workers nor calls


def run(source: Source, interval: float, count: int, console: Console | None = None) -> bool:
    """Show a job again and again, until Ctrl-C or its end.

    Args:
        source: Where the picture of the job comes from.
        interval: The seconds from one look to the next.
        count: How many looks; 0 for no limit.
        console: The terminal; None for that of this process.

    Returns:
        Whether all workers answered the last time.
    """
    console = console or Console(highlight=False)
    picture = Picture()
    looks = 0
    with Live(console=console, screen=console.is_terminal, auto_refresh=False, transient=False) as live:
        while True:
            try:
                job, told = source.look(picture.cursors)
            except JobEnded:
                break
            if picture.state is not None and picture.state.id != job.id:
                picture = Picture()  # it was started again
            picture.look(job, told, time.time())
            state = picture.state
            assert state is not None
            live.update(screen(state, console.width, console.height), refresh=True)
            looks += 1
            if looks == count:
                break
            time.sleep(interval)
    if picture.state is not None and looks != count:
        # The screen is gone with what was on it.
        console.print(Group(screen(picture.state, console.width, console.height), _line("The job has ended.", "bold")))
    return picture.state is not None and not any(worker.silent for worker in picture.state.workers)


def screen(state: State, width: int, height: int) -> Group:
    """All that ``top`` shows of a job, for a terminal of this size."""
    reasons = [worker.name + " " + worker.silent for worker in state.workers if worker.silent]
    reasons += [call.why for call in state.calls if call.why]
    room = max(5, height - _BESIDE_TABLES - len(state.workers) - min(len(reasons), _MOST_REASONS))
    parts: list[Text | Table] = [_head(state), Text(), _workers(state, width)]
    if reasons:
        parts += [Text(), *(_line(reason, "red") for reason in reasons[:_MOST_REASONS])]
    parts += [Text(), _calls(state, room)]
    if state.errors:
        parts += [Text(), _errors(state)]
    return Group(*parts)


def _head(state: State) -> Text:
    everything = state.all
    figures = [
        f"{len(state.workers)} workers",
        f"{_number(everything.calls)} calls/s",
        f"p50 {_time(everything.p50)}",
        f"p99 {_time(everything.p99)}",
        f"{size(int(everything.sent_bytes + everything.received_bytes))}/s",
        f"{_number(everything.errors)} errors/s",
    ]
    head = _line(f"job {state.name}", "bold")
    return head.append("   " + "   ".join(figures), "default")


def _workers(state: State, width: int) -> Table:
    names = ["SERVED/s", "p50", "p99", "MADE/s", "p50", "p99", "ERR/s", "IN/s", "OUT/s", "BUSY", "QUEUE", "MEMORY"]
    shown = [at for at, name in enumerate(names) if width >= _WIDE or name in _ALWAYS]
    table = _table(expand=True)
    table.add_column("WORKER", no_wrap=True)
    for at in shown:
        table.add_column(names[at], justify="right", no_wrap=True)
    table.add_column("DOES", ratio=1, no_wrap=True, overflow="ellipsis")
    for worker in state.workers:
        if worker.silent:
            table.add_row(_line(worker.name, "red"), *[""] * len(shown), _line(worker.silent, "red"))
        else:
            cells = _cells(worker)
            table.add_row(_line(worker.name, "cyan"), *(cells[at] for at in shown), _line(worker.doing))
    return table


def _cells(worker: WorkerCard) -> list[str | Text]:
    """The figures of a worker."""
    served, made = worker.served, worker.made
    errors = sum(rate.errors for rate in (served, made) if rate)
    return [
        *_rate(served),
        *_rate(made),
        _line(_number(errors), "red" if errors else ""),
        size(int(sum(rate.received_bytes for rate in (served, made) if rate))),
        size(int(sum(rate.sent_bytes for rate in (served, made) if rate))),
        _line(f"{worker.threads_busy}/{worker.thread_limit}", "yellow" if worker.queued else ""),
        str(worker.queued),
        size(worker.memory_bytes),
    ]


def _calls(state: State, room: int) -> Table | Text:
    if not state.calls:
        return Text("No calls in flight.", "dim")
    table = _table(expand=True)
    table.add_column("AGE", justify="right")
    for name in ("STATE", "CALL"):
        table.add_column(name, no_wrap=True)
    table.add_column("FUNCTION", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("LEFT", justify="right")
    table.add_column("AT", no_wrap=True, overflow="ellipsis", ratio=1)
    for call in state.calls[:room]:
        old = "yellow" if call.why else ""
        cells = (age(call.seconds), call.state, call.id, short(call.function), age(call.left) or "none", call.place)
        table.add_row(*(_line(cell, old) for cell in cells))
    more = state.more_calls + max(0, len(state.calls) - room)
    table.caption = f"{more} more" if more else None
    table.caption_justify = "left"
    return table


def _errors(state: State) -> Table:
    table = _table(expand=True)
    for name in ("LAST", "ERROR", "TIMES", "CALL", "FUNCTION"):
        table.add_column(name, no_wrap=True)
    table.add_column("MESSAGE", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in state.errors[:_MOST_ERRORS]:
        when = time.strftime("%H:%M:%S", time.localtime(row.time))
        cells = (when, row.type, str(row.count), f"{row.caller}>{row.callee}", short(row.function), row.message)
        table.add_row(*(_line(cell, "red" if at == 1 else "") for at, cell in enumerate(cells)))
    return table


def _table(expand: bool = False) -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), header_style="bold", expand=expand)


def _line(text: str, style: str = "") -> Text:
    """Text of the job's: no markup, and no codes that a terminal obeys."""
    return Text("".join(found if found.isprintable() else "�" for found in text), style)


def _rate(rate: Rate | None) -> tuple[str, str, str]:
    return ("-", "-", "-") if rate is None else (_number(rate.calls), _time(rate.p50), _time(rate.p99))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.1f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.{0 if seconds * factor >= 10 else 1}f} {unit}"
    return age(seconds)
