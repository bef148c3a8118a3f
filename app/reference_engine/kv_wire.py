"""What two engines say to each other when one fetches KV from the other.

    serving                                          fetching
    greeting: nonce                            ->
                                               <-    claim: session, nonce, proof of the secret
    offer: what it is, with proof; or refusal  ->
                                               <-    accepted: true
    the parts, byte after byte, in rank order  ->
                                               <-    taken: proof

Each message is a JSON object behind its length in four bytes. The secret of the session never
travels here; each side proves that it has it, over a number that the other has just drawn. The
parts are what the offer's checksums say. Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app.reference_engine.config import ModelConfig

SCHEMA = 1
PIECE_BYTES = 1 << 20
_HEADER = struct.Struct("!I")
_MAX_MESSAGE_BYTES = 64 * 1024


class MalformedMessage(Exception):
    """The other side does not speak as it should."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has written."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A session's KV: of which prompt, computed by which model with which weights (of each rank, in
    rank order). Checksums in hex. ``weight_version`` is for people."""

    model: str
    weights: tuple[str, ...]
    weight_version: str
    prompt: str
    tokens: int
    parts: tuple[Part, ...]

    def encode(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> Offer:
        """Raises MalformedMessage."""
        try:
            raw = json.loads(text)
            parts, weights = raw.pop("parts"), raw.pop("weights")
            if not isinstance(weights, list):
                raise TypeError
            offer = cls(**raw, weights=tuple(weights), parts=tuple(Part(**one) for one in parts))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise MalformedMessage("not an offer") from error
        texts = (offer.model, offer.weight_version, offer.prompt, *offer.weights)
        numbers = (offer.tokens, *(part.size_bytes for part in offer.parts))
        right = (
            all(type(one) is str for one in (*texts, *(part.sha256 for part in offer.parts)))
            and all(type(one) is int and one >= 0 for one in numbers)
            and len(offer.parts) == len(offer.weights) > 0
        )
        if not right:
            raise MalformedMessage("not an offer")
        return offer


def digest_of_model(config: ModelConfig) -> str:
    """Beside the weights, all that decides what a token's KV is."""
    return hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode()).hexdigest()


def digest_of_prompt(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"!{len(token_ids)}I", *token_ids)).hexdigest()


def part_bytes(config: ModelConfig, kv_heads: int, tokens: int) -> int:
    """Of one rank that has so many key-value heads."""
    return 2 * config.num_layers * kv_heads * tokens * config.head_dim * 4


def proof(secret: bytes, *said: str) -> str:
    """HMAC-SHA256 in hex; no two different things said have the same one."""
    return hmac.new(secret, json.dumps(said).encode(), hashlib.sha256).hexdigest()


def proves(given: object, secret: bytes, *said: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(), proof(secret, *said).encode()
    )


async def send(writer: asyncio.StreamWriter, **message: Any) -> None:
    """Raises OSError."""
    body = json.dumps({"schema": SCHEMA, **message}).encode()
    writer.write(_HEADER.pack(len(body)) + body)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Raises MalformedMessage, or EOFError or OSError when the other side is gone."""
    (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if length > _MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"a message of {length} bytes")
    try:
        message = json.loads(await reader.readexactly(length))
    except ValueError as error:
        raise MalformedMessage("not JSON") from error
    if not isinstance(message, dict) or message.get("schema") != SCHEMA:
        raise MalformedMessage(f"not a message of schema {SCHEMA}")
    return message
