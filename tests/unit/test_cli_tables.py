"""Text for terminals."""

from __future__ import annotations

from farprop.cli.stacks import Line
from farprop.cli.tables import coloured, table


def test_names_of_workers_cannot_steer_the_terminal() -> None:
    evil = "f\033]0;mine\007\nworker9"
    assert table(["FUNCTION"], [[evil]]) == "FUNCTION\nf?]0;mine??worker9"
    assert coloured(evil) == Line(evil).shown() == "f?]0;mine??worker9"
