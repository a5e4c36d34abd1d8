"""What a message is called, in torch's words: for those who want some of them to fail."""

from __future__ import annotations

from farprop._torch import ScriptFunction
from farprop.protocol.references.messages import Kind, unpack_operations
from farprop.wire.codec import Encoded
from farprop.wire.frames import ANSWER, FAILURE, REMOTE, SYSTEM
from farprop.wire.functions import FunctionNotFound, resolve

OPERATE = b"farprop.runtime.owner_calls:operate"
_FETCH = b"farprop.runtime.owner_calls:fetch"
PROPAGATE = b"farprop.runtime.gradients.calls:propagate"

_OPERATIONS = {
    Kind.REGISTER: "RREF_FORK_REQUEST",
    Kind.ACCEPT: "RREF_CHILD_ACCEPT",
    Kind.DELETE: "RREF_USER_DELETE",
    Kind.FORGO: "RREF_USER_DELETE",
    Kind.REVOKE: "RREF_REVOKE",
    Kind.RECALL: "RREF_RECALL",
    Kind.CLEANUP: "CLEANUP_AUTOGRAD_CONTEXT_REQ",
}
MESSAGE_TYPES = frozenset(
    {
        *_OPERATIONS.values(),
        "PYTHON_CALL",
        "SCRIPT_CALL",
        "PYTHON_REMOTE_CALL",
        "SCRIPT_REMOTE_CALL",
        "PYTHON_RREF_FETCH_CALL",
        "SCRIPT_RREF_FETCH_CALL",
        "PYTHON_RET",
        "EXCEPTION",
        "BACKWARD_AUTOGRAD_REQ",
    }
)


def types_of(kind: int, flags: int, name: bytes, encoded: Encoded) -> tuple[frozenset[str], int]:
    """The types of a message, and the number of its batch (0 if it is none). Farprop's own calls have no type.

    A batch of operations has a type for each kind in it. There is one kind of fetch, which both of torch's names mean.
    """
    if kind == ANSWER:
        return frozenset({"PYTHON_RET"}), 0
    if kind == FAILURE:
        return frozenset({"EXCEPTION"}), 0
    if name == OPERATE:
        _, _, number, operations = encoded.keep  # the arguments
        return frozenset(_OPERATIONS[operation.kind] for operation in unpack_operations(operations)), number
    if flags & SYSTEM:
        return frozenset(), 0
    if name == PROPAGATE:
        return frozenset({"BACKWARD_AUTOGRAD_REQ"}), 0
    if name == _FETCH:
        return frozenset({"PYTHON_RREF_FETCH_CALL", "SCRIPT_RREF_FETCH_CALL"}), 0
    language = "SCRIPT" if _is_script(name) else "PYTHON"
    remote = "_REMOTE" if (flags | encoded.flags) & REMOTE else ""
    return frozenset({f"{language}{remote}_CALL"}), 0


def _is_script(name: bytes) -> bool:
    """Operators and TorchScript functions are one language to torch."""
    if name.startswith(b"torch:"):
        return True
    try:
        return bool(name) and isinstance(resolve(name), ScriptFunction)
    except FunctionNotFound:
        return False
