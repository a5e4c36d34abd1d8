"""The command ``farprop stacks``: the Python stacks of all workers, side by side where there is room."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from farprop.cli.py_spy import dump
from farprop.cli.tables import BOLD, CYAN, DIM, RED, YELLOW, coloured, printable
from farprop.inspect.job import Job
from farprop.protocol.inspection import Answer, CallId, Frame, Silence, Thread
from farprop.protocol.waits import listed, short

_LEAST_COLUMN = 60
_GAP = " │ "
_MOST_NAMES = 16


@dataclass(frozen=True)
class Line:
    """A line of a block, and the colour that it has."""

    text: str
    colour: str = ""

    def shown(self, width: int = 0) -> str:
        text = self.text.ljust(width)
        return coloured(text, self.colour) if self.colour else printable(text)


@dataclass
class Block:
    """What one worker does, or several that do the same."""

    workers: list[Answer]
    lines: list[Line]
    """With the ids of this worker's own: of its threads and calls."""
    common: list[Line] = field(default_factory=list)
    """Without them: workers that have the same here are shown together."""

    def all_lines(self) -> list[Line]:
        if len(self.workers) > 1:
            names = listed([worker.name for worker in self.workers], _MOST_NAMES)
            return [Line(f"{names}: {len(self.workers)} workers with the same stacks", BOLD), *self.common]
        member = self.workers[0].member
        return [Line(f"{member.name} (rank {member.rank}, pid {member.pid})", BOLD), *self.lines]


def blocks_of(job: Job, answers: Iterable[Answer], whole: bool) -> list[Block]:
    """The blocks to show. With ``whole``, idle threads of farprop's and frames inside of it are there, too."""
    calls = {row.id: row.function for row in job.all_calls}
    found: list[Block] = []
    by_content: dict[tuple[Line, ...], Block] = {}
    for answer in answers:
        block = _block_of(answer, calls, whole)
        same = by_content.setdefault(tuple(block.common), block) if block.common else block
        if same is block:
            found.append(block)
        else:
            same.workers.append(answer)
    return found


def _block_of(answer: Answer, calls: dict[str, str], whole: bool) -> Block:
    if isinstance(answer, Silence):
        said = [Line(f"  {answer.name} {answer.reason}", RED)]
        return Block([answer], said + [Line(line) for line in dump(answer.member).splitlines()])
    if answer.discreet:
        text = "  Workers of a restricted job don't tell each other their stacks: run farprop stacks on its host."
        return Block([answer], [Line(text)])
    threads = [thread for thread in answer.threads if whole or _is_of_interest(thread)]
    if not threads:
        return Block([answer], [Line("  nothing")], [Line("  nothing")])
    own = [line for thread in threads for line in _thread_lines(thread, answer.name, calls, whole, True)]
    common = [line for thread in threads for line in _thread_lines(thread, answer.name, calls, whole, False)]
    return Block([answer], own, common)


def _is_of_interest(thread: Thread) -> bool:
    """Not farprop's own threads while they have nothing to do."""
    return thread.serves is not None or thread.waits_for is not None or not thread.name.startswith("farprop-")


def _thread_lines(thread: Thread, worker: str, calls: dict[str, str], whole: bool, with_ids: bool) -> Iterator[Line]:
    doing = {True: "computing", False: "asleep", None: ""}[thread.computes]
    # The names of farprop's threads end with that of their worker.
    name = f"{thread.name} ({thread.native_id})" if with_ids else thread.name.removesuffix(f"-{worker}")
    yield Line(f"  {name} {doing}".rstrip(), CYAN)
    if thread.serves is not None:
        yield Line(f"    runs {_named(thread.serves, calls)} for {thread.serves.caller}{_id(thread.serves, with_ids)}")
    if thread.waits_for is not None:
        callee = thread.waits_for.callee
        text = f"    waits for {callee}.{_named(thread.waits_for, calls)}{_id(thread.waits_for, with_ids)}"
        yield Line(text, YELLOW)
    for frame in thread.frames if whole else _programs_frames(thread.frames):
        yield Line(f"    {frame.file}:{frame.line} in {frame.function}")
        if frame.code:
            yield Line(f"      {frame.code}", DIM)


def _named(call: CallId, calls: dict[str, str]) -> str:
    return short(calls.get(str(call), "a function"))


def _id(call: CallId, with_ids: bool) -> str:
    return f", call {call}" if with_ids else ""


def _programs_frames(frames: list[Frame]) -> list[Frame]:
    """The frames without those inside of farprop: of several in a row the outermost stays, which the program called.

    The outermost frames of all are those of the thread that runs the request.
    """
    last = max((at for at, frame in enumerate(frames) if _is_ours(frame) and frame.function == "_run"), default=None)
    shown = frames[:last]
    return [
        frame
        for frame, outer in zip(shown, [*shown[1:], None], strict=True)
        if not (_is_ours(frame) and outer is not None and _is_ours(outer))
    ]


def _is_ours(frame: Frame) -> bool:
    return "/farprop/" in frame.file


# Side by side


def layout(blocks: Sequence[Block], width: int | None = None) -> str:
    """The blocks in as many columns as fit, or one below the other.

    Args:
        blocks: the blocks.
        width: that of the terminal, or 0 if the output goes elsewhere; asked for by default.
    """
    if width is None:
        width = shutil.get_terminal_size((0, 0)).columns
    columns = min(len(blocks), (width + len(_GAP)) // (_LEAST_COLUMN + len(_GAP)))
    if columns < 2:
        return "\n\n".join("\n".join(line.shown() for line in block.all_lines()) for block in blocks)
    each = (width - (columns - 1) * len(_GAP)) // columns
    rows = []
    for start in range(0, len(blocks), columns):
        beside = [_wrapped(block.all_lines(), each) for block in blocks[start : start + columns]]
        lines = []
        for parts in zip_longest(*beside, fillvalue=Line("")):
            lines.append(coloured(_GAP, DIM).join(line.shown(each) for line in parts).rstrip())
        rows.append("\n".join(lines))
    return f"\n{coloured('─' * width, DIM)}\n".join(rows)


def _wrapped(lines: Iterable[Line], width: int) -> list[Line]:
    found = []
    for line in lines:
        text = _shortened(line.text, width)
        indent = " " * (len(text) - len(text.lstrip()) + 2)
        parts = textwrap.wrap(
            text, width, subsequent_indent=indent, drop_whitespace=False, break_on_hyphens=False, tabsize=4
        )
        found += [Line(part, line.colour) for part in parts]
    return found


def _shortened(text: str, width: int) -> str:
    """A line with a long path: its last directories say enough."""
    indent = text[: len(text) - len(text.lstrip())]
    path, found, rest = text.strip().partition(" in ")
    if not found or os.sep not in path or len(text) <= width:
        return text
    parts = path.split(os.sep)
    while len(parts) > 1 and len(indent) + len(f"…/{os.sep.join(parts)} in {rest}") > width:
        del parts[0]
    return f"{indent}…/{os.sep.join(parts)} in {rest}"
