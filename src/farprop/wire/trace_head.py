"""The head ``TRACED`` of a request: what its callee is to record of it, and which trace it belongs to."""

from __future__ import annotations

import msgspec

from farprop.errors import ProtocolError
from farprop.protocol.json_decoding import decode


class TraceHead(msgspec.Struct, omit_defaults=True):
    """Written as JSON, never pickled: a restricted job must be able to refuse a part of it unread."""

    profile: dict[str, bool] | None = None
    """The settings of the caller's legacy profile, or None."""
    carrier: dict[str, str] = {}
    """The context of a distributed trace, by the names of HTTP headers: ``traceparent``, and what else the caller's
    propagator writes."""

    def pack(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def parse(cls, data: bytes | memoryview) -> TraceHead:
        """Read the head; raises ``ProtocolError`` if it is malformed."""
        try:
            return decode(data, cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"the trace head of a call is malformed: {error}") from error
