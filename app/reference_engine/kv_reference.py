"""The wire form of a session of KV, as one engine gives it out and another one is given it."""

from __future__ import annotations

from app.reference_engine.errors import InvalidRequest
from app.reference_engine.kv_fetch import Claim
from app.reference_engine.kv_sessions import KvSession
from app.rpc.openengine.v1 import kv_pb2

BACKEND = "chadburn-kv"
PROTOCOL = "tcp"
_SECRET = "secret"  # noqa: S105 (the name of the attribute)


def reference_of(session: KvSession, host: str, port: int) -> kv_pb2.KvSessionRef:
    """Whoever has it can fetch the session, or end it."""
    reference = kv_pb2.KvSessionRef(
        session_id=session.id,
        transfer_backend=BACKEND,
        endpoints=[kv_pb2.KvEndpoint(host=host, port=port, protocol=PROTOCOL)],
    )
    reference.attributes_struct.update({_SECRET: session.secret.hex()})
    return reference


def claim_of(reference: kv_pb2.KvSessionRef) -> Claim:
    """Raises InvalidRequest."""
    if not reference.session_id:
        raise InvalidRequest("kv.session.session_id", "names a session")
    if reference.transfer_backend != BACKEND:
        raise InvalidRequest("kv.session.transfer_backend", f"this engine fetches by {BACKEND}")
    if reference.dp_rank:
        raise InvalidRequest("kv.session.dp_rank", "must be 0")
    endpoints = [one for one in reference.endpoints if one.protocol == PROTOCOL]
    if len(endpoints) != 1:
        raise InvalidRequest("kv.session.endpoints", f"one of protocol {PROTOCOL}")
    return Claim(reference.session_id, secret_of(reference), endpoints[0].host, endpoints[0].port)


def secret_of(reference: kv_pb2.KvSessionRef) -> bytes:
    """Empty where there is none. Raises InvalidRequest."""
    given = reference.attributes_struct.fields.get(_SECRET)
    try:
        return bytes.fromhex("" if given is None else given.string_value)
    except ValueError as error:
        raise InvalidRequest("kv.session.attributes_struct", "secret is hex") from error
