"""Passes over the graph of a newly compiled function.

A future that Python completed holds a Python object. Compiled code that waits for it would use the object unconverted,
and would take an exception for a value. And after a fork or a wait the code may continue in another thread, without the
autograd context. These passes insert calls to Python that repair both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from farprop._torch import CompilationUnit, inline
from farprop.errors import UsageError, renewed
from farprop.jit.calls import Target
from farprop.jit.python_ops import ANY, NONE, carry_context, python_function
from farprop.runtime.futures import wait_on_pool


def finish_graph(graph: Any) -> None:
    """Check farprop's calls in a new graph, repair its waits, and carry the context across forks and waits.

    A function that calls into Python can't be saved. So a graph that does not use farprop is not changed, except where
    it waits for a future that it got from Python: that may be one of farprop's.
    """
    nodes = list(_nodes(graph))
    calls = [node for node in nodes if _target_of(node) is not None]
    for node in calls:
        _check_call(node)
    moving = [node for node in nodes if node.kind() in ("prim::fork", "aten::wait")]
    if calls or (moving and _uses_farprop(graph)):
        _repair_all(graph)
        return
    for node in moving:
        if node.kind() == "aten::wait" and node.input().node().kind() in ("prim::Param", "prim::PythonOp"):
            _settle_wait(graph, node)


def _uses_farprop(graph: Any) -> bool:
    """Whether the function, or a function that it calls or forks, uses farprop."""
    whole = graph.copy()
    inline(whole)
    for node in _nodes(whole):
        if node.kind() == "prim::PythonOp" and getattr(node.pyobj(), "is_farprop_function", False):
            return True
        if node.kind() == "prim::fork" and _uses_farprop(node.g("Subgraph")):
            return True
    return False


def _repair_all(graph: Any) -> None:
    for node in list(_nodes(graph)):
        if node.kind() == "prim::fork":
            _repair_all(node.g("Subgraph"))
            _copy(graph, _templates().carry, None).insertBefore(node)
        elif node.kind() == "aten::wait":
            _repair_wait(graph, node)
    # Waits for farprop's calls are replaced now. Other uses of a call's future are repaired here.
    for node in list(_nodes(graph)):
        if _target_of(node) is not None and node.output().type().kind() == "FutureType":
            _repair_future(graph, node)


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _target_of(node: Any) -> Target | None:
    """The target of the node, if it is one of farprop's calls."""
    return getattr(node.pyobj(), "target", None) if node.kind() == "prim::PythonOp" else None


def _check_call(node: Any) -> None:
    target, given = _target_of(node), node.inputsAt(1).type()
    if target is None or given.kind() != "TupleType":
        return
    try:
        target.check_arguments(len(given.elements()))
    except UsageError as error:
        raise UsageError(f"{error} A call of {target.schema.name} in compiled code:\n{node.sourceRange()}") from None


def _repair_wait(graph: Any, node: Any) -> None:
    origin, result = node.input().node(), node.output()
    if _target_of(origin) is not None:
        # This wait stays in its thread, and the pool replaces a worker thread that waits.
        own = _put_after(graph, node, _templates().wait, node.input(), result.type())
        result.replaceAllUsesWith(own.output())
        node.destroy()
        return
    _copy(graph, _templates().carry, None).insertBefore(node)
    if origin.kind() != "prim::fork":
        _settle_wait(graph, node)


def _settle_wait(graph: Any, node: Any) -> None:
    result = node.output()
    settled = _put_after(graph, node, _templates().settle, result, result.type())
    result.replaceAllUsesAfterNodeWith(settled, settled.output())
    result.setType(ANY)


def _repair_future(graph: Any, node: Any) -> None:
    future = node.output()
    users = [use.user for use in future.uses() if not _calls(use.user, _templates().wait)]
    if users:
        raising = _put_after(graph, node, _templates().make_raise, future, future.type())
        for user in users:
            user.replaceInputWith(future, raising.output())


def _put_after(graph: Any, node: Any, template: Any, argument: Any, result: Any) -> Any:
    made = _copy(graph, template, argument)
    made.insertAfter(node)
    made.output().setType(result)
    return made


def _copy(graph: Any, template: Any, argument: Any) -> Any:
    return graph.createClone(template, lambda _: argument)


def _calls(node: Any, template: Any) -> bool:
    return node.kind() == "prim::PythonOp" and node.pyobj() is template.pyobj()


# The Python functions behind the inserted nodes


def _waited(future: Any) -> Any:
    return _settled(wait_on_pool(future))


def _settled(value: Any) -> Any:
    """Raise an exception that was set in Python, which compiled code sees as the future's value."""
    if isinstance(value, Exception):
        raise renewed(value)
    return value


def _raising(future: Any) -> Any:
    """A future that raises also where compiled code has lost the Python side of the call's future."""
    return future.then(lambda done: _settled(done.value()))


def _carried() -> None:
    carry_context()


class _Templates(NamedTuple):
    """Nodes to copy, because the Python bindings can't create the node of a call into Python."""

    unit: Any  # keeps the nodes alive
    carry: Any
    wait: Any
    settle: Any
    make_raise: Any


@functools.cache
def _templates() -> _Templates:
    unit = CompilationUnit()
    source = "def templates(value: Any):\n  carry()\n  wait(value)\n  settle(value)\n  make_raise(value)\n"
    names: dict[str, Any] = {
        "carry": python_function(_carried, "carry_context", NONE),
        "wait": python_function(_waited, "wait", ANY, value=ANY),
        "settle": python_function(_settled, "settle", ANY, value=ANY),
        "make_raise": python_function(_raising, "make_raise", ANY, value=ANY),
    }
    unit.define(source, names.get)
    nodes = unit.find_function("templates").graph.nodes()
    return _Templates(unit, *(node for node in nodes if node.kind() == "prim::PythonOp"))
