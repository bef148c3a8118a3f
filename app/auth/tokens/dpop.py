"""Proofs that whoever shows a bound token holds its key (RFC 9449). Pure but for the replay store.

A proof is good for one request: its method and address, this token, now, once. Without a nonce of
ours (`app.auth.tokens.nonces`) a client whose clock can be set forward can make some in advance.
"""

import base64
import hashlib
import hmac
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

from app.auth.tokens.compact import CompactToken, taken_apart
from app.auth.tokens.errors import ProofInvalid, ProofReplayed, TokenMalformed
from app.auth.tokens.issuers import SUPPORTED_ALGORITHMS
from app.auth.tokens.keys import signing_key

PROOF_ALGORITHMS = tuple(sorted(SUPPORTED_ALGORITHMS))
MAX_PROOF_CHARS = 8 * 1024
MAX_JTI_CHARS = 255
MAX_AGE_S = 60
"""Of a proof, beside the issuer's leeway."""

_DEFAULT_PORTS = {"http": 80, "https": 443}
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


class ProofStore(Protocol):
    """Remembers proofs over all replicas."""

    async def first_use(self, digest: str, until: datetime) -> bool:
        """Whether nobody has shown the proof before; from now on somebody has, up to `until`.

        Raises what stands for an unavailable store: then the proof is neither good nor bad.
        """


@dataclass(frozen=True, slots=True)
class Shown:
    """The request that a proof has to be about. ``url``: as callers see it; its query does not
    count (RFC 9449 §4.3)."""

    proof: str
    method: str
    url: str


@dataclass(frozen=True, slots=True)
class Proof:
    """One that holds. ``digest`` stands for it in the store, up to ``until``. ``nonce``: whatever
    it has for one."""

    thumbprint: str
    digest: str
    until: datetime
    nonce: object


def check_proof(shown: Shown, token: str, *, now: datetime, leeway_s: int) -> Proof:
    """Raises ProofInvalid. Whether it was shown before is for `use` to find out."""
    if len(shown.proof) > MAX_PROOF_CHARS or not shown.proof.isascii():
        raise ProofInvalid("The DPoP proof is too large, or not a JWT.")
    try:
        header, parsed = taken_apart(shown.proof)
    except TokenMalformed as error:
        raise ProofInvalid("The DPoP proof is not a well-formed signed JWT.") from error
    if parsed.typ is None or parsed.typ.lower() not in ("dpop+jwt", "application/dpop+jwt"):
        raise ProofInvalid("The DPoP proof's type is not 'dpop+jwt'.")
    thumbprint = _signed_by_its_key(header.get("jwk"), parsed)
    jti, claims = parsed.claims.get("jti"), parsed.claims
    if not isinstance(jti, str) or not 1 <= len(jti) <= MAX_JTI_CHARS or not jti.isprintable():
        raise ProofInvalid("The DPoP proof has no usable 'jti'.")
    if claims.get("htm") != shown.method:
        raise ProofInvalid("The DPoP proof is for another method.")
    if (url := _normal(claims.get("htu"))) is None or url != _normal(shown.url):
        raise ProofInvalid("The DPoP proof is for another address.")
    ath = claims.get("ath")
    if not isinstance(ath, str) or not hmac.compare_digest(ath.encode(), _hash_of(token).encode()):
        raise ProofInvalid("The DPoP proof is for another access token.")
    made = _made_at(claims.get("iat"))
    age_s = (now - made).total_seconds()
    if not -leeway_s <= age_s <= MAX_AGE_S + leeway_s:
        raise ProofInvalid("The DPoP proof is not of this moment; check the clocks.")
    return Proof(
        thumbprint=thumbprint,
        digest=hashlib.sha256(f"{thumbprint} {jti}".encode()).hexdigest(),
        # Replicas whose clocks differ must all have forgotten it no sooner than they refuse it.
        until=made + timedelta(seconds=MAX_AGE_S + 2 * leeway_s + MAX_AGE_S),
        nonce=claims.get("nonce"),
    )


async def use(proof: Proof, store: ProofStore) -> None:
    """Raises ProofReplayed where it was shown before."""
    if not await store.first_use(proof.digest, proof.until):
        raise ProofReplayed


def _signed_by_its_key(jwk: Any, parsed: CompactToken) -> str:
    """The thumbprint of the key that the proof brings along, and is signed with."""
    key = signing_key(jwk)  # none with a private half, symmetric or weak
    if parsed.alg not in SUPPORTED_ALGORITHMS or key is None or not key.fits(parsed.alg):
        raise ProofInvalid("The DPoP proof has no usable public key for its algorithm.")
    if not parsed.is_signed_by(key):
        raise ProofInvalid("The DPoP proof's signature does not verify.")
    return key.thumbprint


def _made_at(value: Any) -> datetime:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            if math.isfinite(value):
                return datetime.fromtimestamp(value, UTC)
        except (OverflowError, ValueError, OSError):
            pass
    raise ProofInvalid("The DPoP proof has no usable 'iat'.")


def _hash_of(token: str) -> str:
    digest = hashlib.sha256(token.encode("ascii")).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _normal(url: Any) -> str | None:
    """The address without query and fragment, in the one form that RFC 3986 §6.2.2 and §6.2.3
    give it; None: it is none."""
    if not isinstance(url, str) or not url.isascii():
        return None
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme not in _DEFAULT_PORTS or not host or parts.username is not None:
        return None
    place = f"[{host}]" if ":" in host else host
    if port is not None and port != _DEFAULT_PORTS[parts.scheme]:
        place = f"{place}:{port}"
    return f"{parts.scheme}://{place}{_ESCAPE.sub(_escape, parts.path or '/')}"


def _escape(found: re.Match[str]) -> str:
    character = chr(int(found[1], 16))
    return character if character in _UNRESERVED else found[0].upper()
