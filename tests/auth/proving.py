"""A caller who holds a key, and proofs of it, good and bad."""

from __future__ import annotations

import base64
import hashlib
import json
from itertools import count
from typing import Any

from joserfc.jwk import ECKey

from tests.auth.made_tokens import signed

_NUMBERS = count()


class Holder:
    """Makes proofs as a client would; every claim and header parameter can be made wrong."""

    def __init__(self, key: Any = None, alg: str = "ES256") -> None:
        self.key = key or ECKey.generate_key("P-256")
        self.alg = alg

    @property
    def binding(self) -> dict[str, str]:
        """``cnf`` of a token that is bound to the key."""
        return {"jkt": self.key.thumbprint()}

    def proof(
        self,
        token: str,
        url: str,
        *,
        at: float,
        method: str = "GET",
        header: dict[str, Any] | None = None,
        **claims: Any,
    ) -> str:
        """An override of ``...`` leaves a claim or a header parameter out."""
        digest = hashlib.sha256(token.encode()).digest()
        table: dict[str, Any] = {
            "jti": f"proof-{next(_NUMBERS)}",
            "htm": method,
            "htu": url,
            "iat": int(at),
            "ath": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            **claims,
        }
        parameters: dict[str, Any] = {
            "typ": "dpop+jwt",
            "jwk": self.key.as_dict(private=False),
            "kid": ...,
            **(header or {}),
        }
        body = json.dumps({name: value for name, value in table.items() if value is not ...})
        alg = parameters.pop("alg", self.alg)
        return signed(body.encode(), alg=alg, key=self.key, **parameters)
