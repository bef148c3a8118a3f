"""Idempotency keys: what a repeated call means."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

from app.domain.errors import IdempotencyKeyReused, MalformedIdempotencyKey
from app.domain.operation import JsonObject

_KEY = re.compile(r"[\x20-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What the store holds for a key: the call it was used for, and what came of it."""

    fingerprint: str
    operation_id: str


def check_key(key: str) -> str:
    """1..128 printable ASCII characters, not all of them blanks."""
    if not _KEY.fullmatch(key) or not key.strip():
        raise MalformedIdempotencyKey(
            "the idempotency key must be 1 to 128 printable ASCII characters"
        )
    return key


def fingerprint(method: str, path: str, body: JsonObject, if_match: str | None) -> str:
    """Hex SHA-256 over a canonical form: the order of keys and the white space do not count."""
    canonical = json.dumps(
        [method, path, dict(body), if_match],
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
        allow_nan=False,
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def replay_of(known: KeyRecord | None, presented: str) -> str | None:
    """The operation that the key stands for, or None for a key not seen before.

    Raises IdempotencyKeyReused when the key was used for another call.
    """
    if known is None:
        return None
    if known.fingerprint != presented:
        raise IdempotencyKeyReused(
            "this idempotency key was used for another request", operation_id=known.operation_id
        )
    return known.operation_id
