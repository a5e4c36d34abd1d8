"""Fault injection for tests of programs that use farprop: reproducible network faults."""

from farprop.testing.faults import FaultPlan, inject

__all__ = ["FaultPlan", "inject"]


def __dir__() -> list[str]:
    return __all__
