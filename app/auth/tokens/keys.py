"""An issuer's published signing keys (RFC 7517), reduced to what may verify a token."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from joserfc.errors import JoseError
from joserfc.jwk import ECKey, OKPKey, RSAKey

VerifyingKey = RSAKey | ECKey | OKPKey

MAX_KEYS = 64
MIN_RSA_BITS = 2048
MAX_RSA_BITS = 8192

# Public members by key type; nothing else of a published key is read by the crypto layer.
_MEMBERS = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}
_PRIVATE_MEMBERS = frozenset(["d", "p", "q", "dp", "dq", "qi", "k", "oth"])
_CURVES = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}
_USED_CURVES = {"EC": frozenset(_CURVES.values()), "OKP": frozenset(["Ed25519"])}


class KeySetUnusable(ValueError):
    """A key document with not a single key a token could be verified with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKey:
    """One public key of the issuer."""

    kid: str | None
    alg: str | None
    """The one algorithm the issuer meant the key for; None where it did not say."""
    key: VerifyingKey
    thumbprint: str
    """RFC 7638, of the key material alone."""

    def fits(self, alg: str) -> bool:
        """Whether a token that says ``alg`` may be verified with this key at all."""
        if self.alg is not None and self.alg != alg:
            return False
        if alg.startswith(("RS", "PS")):
            return isinstance(self.key, RSAKey)
        if alg in _CURVES:
            return isinstance(self.key, ECKey) and self.key.curve_name == _CURVES[alg]
        return isinstance(self.key, OKPKey)  # Ed25519 is the only curve taken in


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys of one issuer at one time."""

    keys: tuple[SigningKey, ...]

    def candidates(self, alg: str, kid: str | None) -> tuple[SigningKey, ...]:
        """The keys a token could have been signed with.

        Usually one; several where the issuer repeats a ``kid``, or the token names none.
        """
        return tuple(k for k in self.keys if k.fits(alg) and (kid is None or k.kid == kid))

    def same_as(self, other: "KeyRing") -> bool:
        """Whether both rings trust the same keys under the same names, in any order."""
        return self._identity() == other._identity()

    def _identity(self) -> frozenset[tuple[str | None, str | None, str]]:
        return frozenset((k.kid, k.alg, k.thumbprint) for k in self.keys)


def parse_key_set(body: bytes) -> KeyRing:
    """The usable keys of a JWK Set.

    Keys of unknown type, for encryption, symmetric, too weak, or published with their private
    half are left out one by one: a strange key must not take the good ones down with it. Raises
    :class:`KeySetUnusable` when nothing is left, so that an empty or broken document is a failed
    fetch and never a reason to forget good keys.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise KeySetUnusable("the key set is not JSON") from error
    published = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(published, list):
        raise KeySetUnusable("the document is not a JWK Set")
    if len(published) > MAX_KEYS:
        raise KeySetUnusable(f"the key set has more than {MAX_KEYS} keys")
    keys = tuple(key for item in published if (key := signing_key(item)) is not None)
    if not keys:
        raise KeySetUnusable("the key set has no usable signing key")
    return KeyRing(keys)


def signing_key(item: Any) -> SigningKey | None:
    """A public key that signatures may be verified with; None: the JWK is of no use for that."""
    if not isinstance(item, dict) or _PRIVATE_MEMBERS & item.keys():
        return None
    kid, alg, operations = item.get("kid"), item.get("alg"), item.get("key_ops")
    if item.get("use", "sig") != "sig":
        return None
    if operations is not None and not (isinstance(operations, list) and "verify" in operations):
        return None
    if not all(value is None or isinstance(value, str) for value in (kid, alg)):
        return None
    key = _import_key(item)
    if key is None:
        return None
    return SigningKey(kid=kid, alg=alg, key=key, thumbprint=key.thumbprint())


def _import_key(item: Mapping[str, Any]) -> VerifyingKey | None:
    kty = item.get("kty")
    if not isinstance(kty, str) or kty not in _MEMBERS:
        return None
    material = {name: item.get(name) for name in _MEMBERS[kty]}
    if not all(isinstance(value, str) for value in material.values()):
        return None
    if kty in _USED_CURVES and material["crv"] not in _USED_CURVES[kty]:
        return None
    public: dict[str, Any] = {"kty": kty, **material}
    try:
        if kty == "EC":
            return ECKey.import_key(public)
        if kty == "OKP":
            return OKPKey.import_key(public)
        # Before the import, which only warns about a short modulus.
        if not MIN_RSA_BITS <= _bits(public["n"]) <= MAX_RSA_BITS:
            return None
        return RSAKey.import_key(public)
    except (JoseError, ValueError, TypeError):
        return None


def _bits(number: str) -> int:
    padded = number + "=" * (-len(number) % 4)
    return int.from_bytes(base64.urlsafe_b64decode(padded)).bit_length()
