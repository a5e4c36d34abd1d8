"""A profiler of all calls that this process serves, on all threads."""

from __future__ import annotations

import itertools
from typing import Any

from torch.autograd.profiler_util import EventList

from farprop._torch import build_tree, legacy_profile
from farprop.runtime import profiling


class _server_process_global_profile(legacy_profile):  # type: ignore[misc]  # noqa: N801, torch's name
    """Like ``torch.autograd.profiler.profile``, but for the calls that this process serves inside the ``with`` block.

    ``process_global_function_events`` has a list of events for each call.
    """

    entered: bool
    process_global_function_events: list[list[Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def __enter__(self) -> Any:
        if self.enabled:
            if self.entered:
                raise RuntimeError("autograd profiler traces are not reentrant")
            self.entered = True
            self.process_global_function_events = []
            profiling.served_calls.append((profiling.settings_of(self), self.process_global_function_events))
        return self

    def __exit__(self, *_: Any) -> None:
        if self.enabled:
            ours = self.process_global_function_events
            profiling.served_calls[:] = [entry for entry in profiling.served_calls if entry[1] is not ours]
            self.function_events = EventList(
                itertools.chain.from_iterable(ours), use_device=None, profile_memory=self.profile_memory
            )
            build_tree(self.function_events)
