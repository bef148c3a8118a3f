"""New weights as an engine's own serializer has written them: for the engine, and for nobody else.

What is in such a payload nobody but the engine looks at, so that it can't be compared with anything
before it is loaded; and reading it may run what its writer has put there. It is passed on only
where that is allowed by name: see `admin:weights.unsafe`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, field
from typing import ClassVar, cast

from app.domain.command import fault
from app.domain.kinds import WeightTransferBackend
from app.domain.operation import JsonObject, JsonValue

SGLANG_TENSORS = "sglang.serialized_named_tensors"
"""What SGLang's `MultiprocessingSerializer` writes, one part for each tensor-parallel rank."""

_POINTER = "/source/session"
_FORMAT = re.compile(r"[a-z0-9][a-z0-9_.-]{0,127}")
_LOAD_FORMAT = re.compile(r"[\x21-\x7e]{1,256}")
_MAX_PARTS = 4096
# What a part takes in a message beside its bytes, and the message beside its parts.
_PART_BYTES = 16
_MESSAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class EnginePayloadTransfer:
    """`format`: whose serializer wrote what comes, in a word that the engine's profile has."""

    kind: ClassVar[WeightTransferBackend] = WeightTransferBackend.ENGINE_PAYLOAD
    format: str

    def __post_init__(self) -> None:
        if not _FORMAT.fullmatch(self.format):
            raise fault(f"{_POINTER}/begin/engine_payload/format", "must be the name of a format")

    def document(self) -> dict[str, JsonValue]:
        return {"format": self.format}

    @classmethod
    def of(cls, document: JsonObject) -> EnginePayloadTransfer:
        return cls(cast("str", document["format"]))


@dataclass(frozen=True, slots=True)
class EnginePayloadChunk:
    """`parts`: one for each rank that the engine deals them out to, in their order. `load_format`:
    how the engine is to read them, in its own words; None: as it does by itself."""

    kind: ClassVar[WeightTransferBackend] = WeightTransferBackend.ENGINE_PAYLOAD
    parts: tuple[bytes, ...] = field(repr=False)
    load_format: str | None = None

    def __post_init__(self) -> None:
        pointer = f"{_POINTER}/chunk/engine_payload"
        if not 0 < len(self.parts) <= _MAX_PARTS:
            raise fault(f"{pointer}/parts", f"must be 1 to {_MAX_PARTS}, one for each rank")
        for index, part in enumerate(self.parts):
            if not part:
                raise fault(f"{pointer}/parts/{index}", "must not be empty")
        if self.load_format is not None and not _LOAD_FORMAT.fullmatch(self.load_format):
            raise fault(f"{pointer}/load_format", "must be 1 to 256 printable ASCII characters")

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.parts))

    @property
    def sha256(self) -> str:
        """Of the SHA-256 of each part, so that no other division into parts has it."""
        whole = b"".join(hashlib.sha256(part).digest() for part in self.parts)
        return hashlib.sha256(whole).hexdigest()

    def check_fits(self, limit_bytes: int) -> None:
        """Whether it goes into one message of that size, 0: no limit is told. Raises
        InvalidArgument."""
        overhead = _MESSAGE_BYTES + _PART_BYTES * len(self.parts)
        if limit_bytes and self.size_bytes + overhead > limit_bytes:
            detail = f"are more than this engine takes in one message ({limit_bytes} bytes)"
            raise fault(f"{_POINTER}/chunk/engine_payload/parts", detail)

    def document(self) -> dict[str, JsonValue]:
        return {
            "parts": [base64.b64encode(part).decode("ascii") for part in self.parts],
            "load_format": self.load_format,
        }

    @classmethod
    def of(cls, document: JsonObject) -> EnginePayloadChunk:
        parts = cast("list[str]", document["parts"])
        return cls(
            tuple(base64.b64decode(part, validate=True) for part in parts),
            cast("str | None", document["load_format"]),
        )
