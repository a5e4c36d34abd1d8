"""Short texts for the trace of a run."""

from __future__ import annotations

from farprop.ids import GlobalId
from farprop.protocol.references.messages import Batch, Fork, Operation, Reply
from farprop.protocol.references.records import OwnedValue, UserReference


def show(thing: object) -> object:
    """What the trace prints for something."""
    match thing:
        case GlobalId():
            return f"{thing.created_on}.{thing.local_id}"
        case Reply():
            return f"reply {thing.number} {list(thing.results)}"
        case Batch():
            return f"batch {thing.number} [{', '.join(str(show(operation)) for operation in thing.operations)}]"
        case Operation():
            return f"{thing.kind.name}{'*' if thing.flag else ''} value {show(thing.rref)} fork {show(thing.fork)}"
        case Fork():
            return f"fork {show(thing.fork)} of value {show(thing.rref)} at {thing.owner}{'' if thing.exists else '?'}"
        case UserReference():
            return f"reference {show(thing.fork)} to value {show(thing.rref)} at {thing.owner} ({thing.state.name})"
        case OwnedValue():
            return f"own value {show(thing.rref)} ({thing.state.name})"
        case list():
            return "[" + ", ".join(str(show(item)) for item in thing) + "]"
    return thing
