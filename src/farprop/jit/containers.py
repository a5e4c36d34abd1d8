"""Lists and dicts that compiled code shares with the value of a reference.

What compiled code gets from Python is a copy, and what it changes there would be lost. So a list or a dict that it
takes from a reference on the owner becomes a container of TorchScript's, and stays one.
"""

from __future__ import annotations

from typing import Any

import torch

from farprop._torch import ScriptDict, ScriptList
from farprop.errors import UsageError
from farprop.jit.python_functions import JitType
from farprop.runtime.cells import Cell

# TorchScript looks at the elements to find the type of a container. An empty one is made with one of these in it.
_SAMPLES = {"IntType": 0, "FloatType": 0.0, "BoolType": False, "StringType": "", "TensorType": torch.empty(0)}


def share(cell: Cell, declared: JitType) -> None:
    """Make the cell's value, a list or a dict, one that compiled code can change."""
    value = cell.get()
    if type(value) is list:
        cell.replace(value, _script_list(value, declared))
    elif type(value) is dict:
        cell.replace(value, _script_dict(value, declared))


def _script_list(value: list[Any], declared: JitType) -> Any:
    if value:
        return ScriptList(value)
    (element,) = declared.containedTypes()
    made = ScriptList([_sample(element, declared)])
    made.clear()
    return made


def _script_dict(value: dict[Any, Any], declared: JitType) -> Any:
    if value:
        return ScriptDict(value)
    key, element = (_sample(part, declared) for part in declared.containedTypes())
    made = ScriptDict({key: element})
    del made[key]
    return made


def _sample(type: JitType, container: JitType) -> Any:
    try:
        return _SAMPLES[type.kind()]
    except KeyError:
        raise UsageError(
            f"Compiled code takes an empty {container.annotation_str} from a reference. TorchScript can't tell what it "
            "is a container of. Put something into it first, or use a container of simpler values."
        ) from None
