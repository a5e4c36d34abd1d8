"""How the workers of a job write their messages, and read them. A worker chooses once, when it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from farprop.wire import codec, failures, functions
from farprop.wire.codec import Encoded


class Dialect(NamedTuple):
    """The functions that a worker uses for all of its messages."""

    restricted: bool
    name_of: Callable[[Any], bytes | None]
    """The name by which a function is called on another worker, or None if it has to travel itself."""
    resolve: Callable[[bytes], Any]
    """The function that a name stands for here."""
    vet: Callable[[bytes, int, str, Sequence[Any], dict[str, Any]], None] | None
    """Raises if a worker of this rank and name may not call a function, given by its name, with these arguments."""
    may_be_system: Callable[[bytes], bool] | None
    """Whether a function, given by its name, is of those that limits and queues don't hold up, if a peer says so; None
    if all are.
    """
    method_of: Callable[[Any, str], Any]
    """A method of a value that others refer to."""
    encode: Callable[..., Encoded]
    decode: Callable[..., Any]
    encode_call: Callable[..., Encoded]
    decode_call: Callable[[Any, Sequence[Any], int], tuple[Sequence[Any], dict[str, Any]]]
    encode_value: Callable[..., Encoded]
    decode_value: Callable[[Any, Sequence[Any], int], Any]
    encode_failure: Callable[[BaseException, str], Encoded]
    decode_failure: Callable[[Any], Exception]


PICKLES = Dialect(
    restricted=False,
    name_of=functions.name_of,
    resolve=functions.resolve,
    vet=None,
    may_be_system=None,
    method_of=getattr,
    encode=codec.encode,
    decode=codec.decode,
    encode_call=codec.encode_call,
    decode_call=codec.decode_call,
    encode_value=codec.encode_value,
    decode_value=codec.decode_value,
    encode_failure=failures.encode_failure,
    decode_failure=failures.decode_failure,
)
