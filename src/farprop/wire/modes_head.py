"""The head ``MODES`` of a request: in which modes of its caller's thread the function runs."""

from __future__ import annotations

import msgspec

from farprop.errors import ProtocolError
from farprop.protocol.json_decoding import decode


class ModesHead(msgspec.Struct, omit_defaults=True):
    """Written as JSON, like ``TraceHead``."""

    autocast: dict[str, str] = {}
    """The types of devices that ``torch.autocast`` is on for, with the dtypes: ``{"cpu": "bfloat16"}``."""
    checkpoint: bool = False
    """Whether the call was made inside of ``torch.utils.checkpoint``."""

    def pack(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def parse(cls, data: bytes | memoryview) -> ModesHead:
        """Read the head; raises ``ProtocolError`` if it is malformed."""
        try:
            return decode(data, cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"the modes of a call are malformed: {error}") from error
