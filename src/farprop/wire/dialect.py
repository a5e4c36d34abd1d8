"""The set of codec functions that a worker uses: pickle, or data alone in a restricted job. Chosen when it joins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from farprop.wire import codec, fast_codec, function_names, remote_exceptions
from farprop.wire.message import Message
from farprop.wire.tensors import Place

Payload = bytes | bytearray | memoryview


class EncodeCall(Protocol):
    """Encodes a call. ``graph`` collects the tensors that require grad; ``place`` maps devices to the receiver's."""

    def __call__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        graph: list[torch.Tensor] | None = None,
        place: Place | None = None,
    ) -> Message: ...


class EncodeValue(Protocol):
    def __call__(self, value: Any, graph: list[torch.Tensor] | None = None, place: Place | None = None) -> Message: ...


class Dialect(NamedTuple):
    """The functions that a worker uses for all of its messages."""

    restricted: bool
    name_of: Callable[[Any], bytes | None]
    """The name by which a function is called on another worker, or None if it has to be pickled."""
    resolve: Callable[[bytes], Any]
    """The function that a name stands for here."""
    vet: Callable[[bytes, int, str, Sequence[Any], dict[str, Any]], None] | None
    """Authorises a call; raises if a worker of this rank and name may not call a function with these arguments."""
    may_be_system: Callable[[bytes], bool] | None
    """Whether a function, given by its name, may bypass limits and queues when the caller asks; None if all may."""
    method_of: Callable[[Any, str], Any]
    """Looks up a method of a value that remote references refer to."""
    encode_call: EncodeCall
    decode_call: Callable[[Payload, Sequence[Any], int], tuple[Sequence[Any], dict[str, Any]]]
    """Decodes the arguments of a function that is called by its name."""
    decode_function_call: Callable[[Payload, Sequence[Any]], tuple[Any, tuple[Any, ...], dict[str, Any]]]
    """Decodes a pickled function and its arguments."""
    encode_value: EncodeValue
    decode_value: Callable[[Payload, Sequence[Any], int], Any]
    encode_failure: Callable[[BaseException, str], Message]
    decode_failure: Callable[[Payload], Exception]


PICKLES = Dialect(
    restricted=False,
    name_of=function_names.name_of,
    resolve=function_names.resolve,
    vet=None,
    may_be_system=None,
    method_of=getattr,
    encode_call=fast_codec.encode_call,
    decode_call=fast_codec.decode_call,
    decode_function_call=codec.decode,
    encode_value=fast_codec.encode_value,
    decode_value=fast_codec.decode_value,
    encode_failure=remote_exceptions.encode_failure,
    decode_failure=remote_exceptions.decode_failure,
)

# For workers that a program starts and that have another ``__main__`` than it.
PICKLES_MAIN_BY_VALUE = PICKLES._replace(
    name_of=function_names.name_outside_main,
    encode_call=partial(fast_codec.encode_call, encode=codec.encode_main_by_value),
    encode_value=partial(fast_codec.encode_value, encode=codec.encode_main_by_value),
    encode_failure=partial(remote_exceptions.encode_failure, encode=codec.encode_main_by_value),
)
