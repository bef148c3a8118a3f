"""A JWT in compact form: taken apart strictly, and its signature checked."""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from joserfc import jws
from joserfc.errors import JoseError

from app.auth.tokens.errors import TokenMalformed
from app.auth.tokens.issuers import SUPPORTED_ALGORITHMS
from app.auth.tokens.keys import SigningKey
from app.auth.tokens.strict_json import json_object

MAX_HEADER_BYTES = 4096

_SEGMENT = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactToken:
    """What a token says of itself. Nothing in it may be believed before :meth:`is_signed_by`."""

    text: str
    claims: Mapping[str, Any]
    alg: str
    kid: str | None
    typ: str | None

    def is_signed_by(self, key: SigningKey) -> bool:
        """Whether ``key`` made the signature, with the one algorithm the token names."""
        registry = _Registry(algorithms=[self.alg], strict_check_header=False)
        try:
            jws.deserialize_compact(self.text, key.key, registry=registry)
        except (JoseError, ValueError):
            return False
        return True


def is_opaque(token: str) -> bool:
    """Whether the token has neither form of the JOSE compact serialisation (RFC 7515 §7.1,
    RFC 7516 §7.1), so that nothing in it can name its issuer."""
    return token.count(".") not in (2, 4)


def parse(token: str) -> CompactToken:
    """Take a signed JWT apart; of its header only what chooses a key is kept.

    Stricter than the syntax asks, because two readers of one token must not see two different
    tokens: no padding or foreign characters in base64url, no member twice in a JSON object, no
    NaN. Header extensions marked critical are refused, as none is understood here (RFC 7515
    §4.1.11). Raises :class:`TokenMalformed`. The caller bounds the length.
    """
    return taken_apart(token)[1]


def taken_apart(token: str) -> tuple[dict[str, Any], CompactToken]:
    """As `parse`, with the whole header: of a kind of token whose key stands in it."""
    segments = token.split(".")
    if len(segments) != 3 or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise TokenMalformed
    header, claims = _json_object(segments[0]), _json_object(segments[1])
    alg, kid, typ = header.get("alg"), header.get("kid"), header.get("typ")
    if not isinstance(alg, str):
        raise TokenMalformed
    if not all(value is None or isinstance(value, str) for value in (kid, typ)):
        raise TokenMalformed
    if "crit" in header or "b64" in header:
        raise TokenMalformed("The access token has critical header parameters not known here.")
    return header, CompactToken(text=token, claims=claims, alg=alg, kid=kid, typ=typ)


class _Registry(jws.JWSRegistry):
    max_header_length = MAX_HEADER_BYTES

    def get_alg(self, name: str):  # type: ignore[no-untyped-def]  # joserfc exports no name for it
        # Refused here too, whatever a caller allowed: a symmetric algorithm must be out of reach.
        if name not in SUPPORTED_ALGORITHMS:
            raise ValueError(name)
        # RFC 9864 splits the polymorphic name; on an Ed25519 key both mean the same signature.
        if name == "EdDSA":
            return self.algorithms["Ed25519"]
        return super().get_alg(name)


def _json_object(segment: str) -> dict[str, Any]:
    try:
        return json_object(base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4)))
    except ValueError as error:
        raise TokenMalformed from error
