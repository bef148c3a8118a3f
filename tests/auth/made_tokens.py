"""Tokens of every making, good and bad, signed with keys of their own."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import warnings
from collections.abc import Callable
from typing import Any

from joserfc import jws
from joserfc.jwk import ECKey, OKPKey, RSAKey

ADMIN = "https://gateway.test/admin"
INFERENCE = "https://gateway.test/inference"
NOW = 1793620800  # what the clock fixture shows at first


# The table signs with its own keys, published beside the issuer's: whatever header and payload
# it wants, also such as no issuer would make.
EC = ECKey.generate_key("P-256", {"kid": "table-ec", "use": "sig"})
RSA = RSAKey.generate_key(2048, {"kid": "table-rsa", "use": "sig"})
ED = OKPKey.generate_key("Ed25519", {"kid": "table-ed", "use": "sig"})
STRANGER = ECKey.generate_key("P-256", {"kid": "stranger"})
KEYS: dict[str, Any] = {"ES256": EC, "RS256": RSA, "PS256": RSA, "EdDSA": ED, "Ed25519": ED}


def claims(**overrides: Any) -> dict[str, Any]:
    """Good claims; an override of ``...`` leaves the claim out."""
    table: dict[str, Any] = {
        "iss": "set by the test",
        "sub": "ops",
        "aud": ADMIN,
        "client_id": "console",
        "scope": "admin:read",
        "iat": NOW - 60,
        "exp": NOW + 600,
        "jti": "t-1",
        **overrides,
    }
    return {name: value for name, value in table.items() if value is not ...}


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def unsigned(header: Any, payload: bytes, signature: bytes) -> str:
    return f"{b64(json.dumps(header).encode())}.{b64(payload)}.{b64(signature)}"


class _AnyHeader(jws.JWSRegistry):
    def check_header(self, header: Any) -> None:
        """Sign whatever is asked for."""


def signed(
    payload: bytes | dict[str, Any], *, alg: str = "ES256", key: Any = None, **header: Any
) -> str:
    key = key or KEYS[alg]
    parameters = {"alg": alg, "typ": "at+jwt", "kid": key.kid, **header}
    parameters = {name: value for name, value in parameters.items() if value is not ...}
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library warns of EdDSA's old name by itself
        return jws.serialize_compact(parameters, body, key, registry=_AnyHeader(algorithms=[alg]))


def hmac_with_public_pem(iss: str, key: Any) -> str:
    """The classic: HS256 whose secret is the issuer's public key."""
    header = {"alg": "HS256", "typ": "at+jwt", "kid": key.kid}
    text = unsigned(header, json.dumps(claims(iss=iss)).encode(), b"").rstrip(".")
    secret = key.as_pem(private=False)
    return f"{text}.{b64(hmac.new(secret, text.encode(), hashlib.sha256).digest())}"


def tampered(iss: str) -> str:
    head, _, signature = signed(claims(iss=iss)).split(".")
    return f"{head}.{b64(json.dumps(claims(iss=iss, scope='admin:shutdown')).encode())}.{signature}"


def swapped_signature(iss: str) -> str:
    one, other = signed(claims(iss=iss)), signed(claims(iss=iss, sub="else"))
    return one.rpartition(".")[0] + "." + other.rpartition(".")[2]


def doubled_member(iss: str) -> bytes:
    good = json.dumps(claims(iss=iss))
    return good[:-1].encode() + b', "scope": "admin:shutdown"}'


Make = Callable[[str], str]  # from the issuer's URL to a token


OMIT: Any = ...


def changed(**overrides: Any) -> Make:
    return lambda iss: signed(claims(**{"iss": iss, **overrides}))


def headed(**header: Any) -> Make:
    return lambda iss: signed(claims(iss=iss), **header)


def with_algorithm(name: str) -> Make:
    header = {"alg": name, "typ": "at+jwt"}
    return lambda iss: unsigned(header, json.dumps(claims(iss=iss)).encode(), b"x")


def with_number(claim: str, text: str) -> Make:
    """The claim written as this JSON number, whatever Python would make of it."""

    def make(iss: str) -> str:
        document = json.dumps(claims(**{"iss": iss, claim: "@"}))
        return signed(document.replace('"@"', text).encode())

    return make
