"""Texts that the program or another process wrote, for terminals, logs and pages."""

from __future__ import annotations


def one_line(text: str, most: int) -> str:
    """A text on one line, of at most so many characters. What is cut ends with ``…``.

    What a terminal or a browser would obey instead of showing it becomes ``?``: control codes, codes that turn the
    direction of writing, and halves of surrogate pairs, which are no JSON either.
    """
    line = " ".join(text[: 4 * most].split())  # a text may have gigabytes
    if len(line) > most or (len(text) > 4 * most and line):
        line = f"{line[: most - 1]}…"
    return line if line.isprintable() else "".join(found if found.isprintable() else "?" for found in line)
