"""Memory for bytes that are still to come."""

from __future__ import annotations

import numpy

from farprop.errors import ProtocolError


def room_for(length: int) -> memoryview:
    """Writable memory that the system gives as it is written to, and not before: a header costs whoever sends it
    nothing, and could claim anything. (A ``bytearray`` is zeroed, so all of it is there at once.)
    """
    try:
        return numpy.empty(length, numpy.uint8).data
    except (MemoryError, ValueError) as error:
        raise ProtocolError(f"a header announces {length} bytes, and there is no memory for them") from error
