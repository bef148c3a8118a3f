"""New weights as a trainer's own SGLang has pickled them, passed on unread.

SGLang unpickles what it is sent, ends over what it did not expect, and over a payload that it has
read before: the shared memory that it names is gone then. So none is sent twice in one life of the
engine, whoever asks, and whatever can be told of one without reading it is looked at first.
"""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace

from app.domain.commands import UpdateWeights
from app.domain.engine_payloads import EnginePayloadChunk
from app.domain.operation import OperationWarning
from app.domain.weight_sessions import Chunk
from app.enginekit.runtime import Conclusion, Order, RuntimeFault
from app.sidecars.carried import Pieces
from app.sidecars.faults import refused
from app.sidecars.sglang.belief import PAYLOADS_REMEMBERED
from app.sidecars.sglang.engine import SglangEngine
from app.sidecars.sglang.weight_orders import Updating

# What SGLang reads by itself. Over a word that it does not know its scheduler ends.
_LOAD_FORMATS = (None, "direct", "flattened_bucket")
# How a pickle begins (its protocol) and ends.
_PROTO, _STOP = b"\x80", b"."
_NOT_READ = OperationWarning(
    "PAYLOAD_NOT_READ",
    "nobody but the engine has read what it was sent: that it held whole tensors of this model, and"
    " all that were to be new, is the caller's word",
)


class CarriedPayloads(Updating):
    """In pieces, under a pause of the caller's: each is in the model as soon as it has come."""

    def __init__(self, order: Order, command: UpdateWeights, engine: SglangEngine) -> None:
        super().__init__(order, command, engine)
        self.pieces = Pieces(self._open, self._take)

    async def _open(self) -> None:
        self.engine.belief.may_update()
        await super().prepare()
        if self.command.check_finite:
            raise RuntimeFault(
                "TRANSFER_NOT_OFFERED",
                "what the engine alone can read cannot be looked at before it is loaded",
                code="INVALID_ARGUMENT",
            )

    async def _take(self, chunk: Chunk) -> None:
        payload = chunk.payload
        assert isinstance(payload, EnginePayloadChunk)  # the kit has compared it with the session
        digest = await asyncio.to_thread(self._looked_at, payload)
        if not self.sent:
            await self.closed()
            await self.begin()
        # On disk before it is sent: whether an order without an answer was read nobody knows.
        belief = self.engine.belief
        known = (*belief.payloads, digest)[-PAYLOADS_REMEMBERED:]
        self.engine.believe(replace(belief, payloads=known))
        self.size_bytes += payload.size_bytes
        named = {} if payload.load_format is None else {"load_format": payload.load_format}
        await self.send(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": [
                    base64.b64encode(part).decode("ascii") for part in payload.parts
                ],
                "selector": self.component.value,
                "flush_cache": False,
                "abort_all_requests": False,
                **named,
            },
        )

    def _looked_at(self, payload: EnginePayloadChunk) -> str:
        """Its digest. Raises RuntimeFault."""
        ranks = self.engine.found.tensor_parallel_size
        if len(payload.parts) != ranks:
            raise _unfit(f"the engine takes one part for each of its ranks, which are {ranks}")
        if not all(part.startswith(_PROTO) and part.endswith(_STOP) for part in payload.parts):
            raise _unfit("a part is not as the engine's serializer writes them, or is cut off")
        if payload.load_format not in _LOAD_FORMATS:
            raise _unfit("load_format may be direct or flattened_bucket, or is left out")
        digest = payload.sha256
        if digest in self.engine.belief.payloads:
            raise refused(
                "PAYLOAD_ALREADY_SENT",
                "the engine was sent this very payload before, and what it names may be gone",
            )
        return digest

    async def prepare(self) -> None:
        """All pieces are there, and in the model."""
        if not self.sent:
            raise _unfit("no piece was sent")

    async def commit(self) -> None:
        await self.complete()

    async def conclude(self) -> Conclusion:
        """Weights that were nobody's are whole again because the caller says so: no proof."""
        concluded = await super().conclude()
        return replace(
            concluded,
            warnings=(*concluded.warnings, _NOT_READ),
            proved=not self.order.replace_all and not self.unchanged,
        )


def _unfit(said: str) -> RuntimeFault:
    return RuntimeFault("PAYLOAD_UNFIT", said, code="INVALID_ARGUMENT")
