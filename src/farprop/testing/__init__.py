"""For tests of programs that use farprop: make the network misbehave, on purpose and repeatably."""

from farprop.testing.faults import FaultPlan, inject

__all__ = ["FaultPlan", "inject"]
