"""Process groups written in Python.

::

    from farprop.distributed import ProcessGroup, Work

    class MyGroup(ProcessGroup):
        def send(self, tensors, dst, tag): ...
        def recv(self, tensors, src, tag): ...
"""

from farprop.distributed.example_groups import CountingProcessGroup, FaultyProcessGroup, LonelyProcessGroup
from farprop.distributed.native import NativeProcessGroup  # registers the backend "farprop"
from farprop.distributed.process_group import ProcessGroup
from farprop.distributed.work import Work, work_from_future

__all__ = [
    "CountingProcessGroup",
    "FaultyProcessGroup",
    "LonelyProcessGroup",
    "NativeProcessGroup",
    "ProcessGroup",
    "Work",
    "work_from_future",
]


def __dir__() -> list[str]:
    return __all__
