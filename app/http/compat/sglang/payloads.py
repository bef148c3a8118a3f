"""Tensors that a trainer has pickled, where the gateway and the engine's sidecar both allow it.
They are pieces of one update, as those of a group are, and each reaches the engine once."""

from __future__ import annotations

import base64

from app.domain.engine_payloads import (
    SGLANG_TENSORS,
    EnginePayloadChunk,
    EnginePayloadTransfer,
)
from app.domain.weight_sessions import check_version
from app.http.compat.asked import Asked
from app.http.compat.backing import updates_by_payload
from app.http.compat.giving import CompatCall
from app.http.compat.refusals import Invalid, NeverOffered, WouldHarm
from app.http.compat.sessions import open_session_of, take_once
from app.http.compat.sglang.bodies import TensorBody, body_of
from app.http.compat.sglang.pieces import Beginning, begin_with, refuse_another_version
from app.http.payloads import EnginePayloadsOff

_NOT_TAKEN = (
    "This engine is passed no pickled payload: its sidecar was not started with --allow-pickled."
)
_TRANSFER = EnginePayloadTransfer(SGLANG_TENSORS)


async def tensors(call: CompatCall, asked: Asked) -> None:
    """The body is looked at only when it may be passed on."""
    rule = call.house.payloads
    if not rule.takes(call.engine):
        raise EnginePayloadsOff
    if not updates_by_payload(call.can):
        raise NeverOffered(_NOT_TAKEN)
    await rule.admit(call.request, call.engine)
    body = body_of(TensorBody)(asked)
    payload = EnginePayloadChunk(_parts(body), body.load_format)
    payload.check_fits(call.can.limits.max_message_bytes)  # before an update begins with it
    if body.weight_version is not None:
        check_version(body.weight_version, "/weight_version")
    found = await open_session_of(call)
    if found is None:
        first = Beginning(
            transfer=_TRANSFER,
            selector=body.selector,
            weight_version=body.weight_version,
            flush_cache=body.flush_cache,
            abort_all_requests=body.abort_all_requests,
            take=lambda begun: take_once(call, begun, payload),
        )
        await begin_with(call, first)
        return
    if found.transfer != _TRANSFER:
        raise WouldHarm("the pieces of one update come in one way")
    refuse_another_version(found, body.weight_version)
    await take_once(call, found, payload)


def _parts(body: TensorBody) -> tuple[bytes, ...]:
    """Raises Invalid. Never says what stood there."""
    parts = []
    for index, part in enumerate(body.serialized_named_tensors):
        try:
            parts.append(base64.b64decode(part, validate=True))
        except ValueError:
            place = f"body.serialized_named_tensors.{index}"
            raise Invalid(place, "base64_decode", "Data should be valid base64") from None
    return tuple(parts)
