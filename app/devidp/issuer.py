"""Keys and tokens of the development issuer (RFC 9068 access tokens)."""

import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, RSAKey

ALGORITHMS = ("ES256", "RS256")
KEY_FILE = "dev-issuer-key.json"


class KeyFileUnsafe(RuntimeError):
    """The kept key cannot be used; the message says why and what to do."""


class DevIssuer:
    """Signs access tokens for one issuer URL.

    With a ``data_dir`` the key is kept there (mode 0600), so that a demonstration started again
    on the same port still accepts the tokens it gave out before; without one it lives as long as
    the object.
    """

    def __init__(
        self,
        issuer: str,
        *,
        now: Callable[[], datetime],
        algorithm: str = "ES256",
        data_dir: Path | None = None,
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}")
        self.issuer = issuer
        self.algorithm = algorithm
        self._now = now
        self._data_dir = data_dir
        kept = _read_key(data_dir / KEY_FILE) if data_dir is not None else None
        if kept is not None and kept.alg == algorithm:
            self._key = kept
        else:
            self._key = self._new_key()
        self._retired: list[RSAKey | ECKey] = []

    @property
    def key(self) -> RSAKey | ECKey:
        """What signs now."""
        return self._key

    def now_s(self) -> float:
        """Seconds since 1970."""
        return self._now().timestamp()

    def mint(
        self,
        subject: str,
        client_id: str,
        scopes: Iterable[str],
        audience: str | list[str],
        ttl_s: int = 3600,
        *,
        header: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> str:
        """An access token, valid from now for ``ttl_s`` seconds.

        ``overrides`` replace claims, or leave one out where the value is None; ``header``
        likewise for header parameters. They exist so that tests can make tokens that should
        never be accepted.
        """
        issued = int(self._now().timestamp())
        claims: dict[str, Any] = {
            "iss": self.issuer,
            "sub": subject,
            "aud": audience,
            "client_id": client_id,
            "scope": " ".join(scopes),
            "iat": issued,
            "exp": issued + ttl_s,
            "jti": secrets.token_urlsafe(12),
        }
        claims.update(overrides)
        parameters = {"alg": self.algorithm, "typ": "at+jwt", "kid": self._key.kid}
        parameters.update(header or {})
        return self.sign(
            {name: value for name, value in claims.items() if value is not None},
            {name: value for name, value in parameters.items() if value is not None},
        )

    def sign(self, claims: dict[str, Any], header: dict[str, Any]) -> str:
        """A JWT with exactly these claims and header, signed with the current key."""
        return jwt.encode(header, claims, self._key, algorithms=[self.algorithm], default_type=None)

    def rotate(self, *, keep_previous: bool = True) -> str:
        """Sign with a new key from now on; returns its id. The previous key stays published
        unless ``keep_previous`` is false, which is what withdrawing a leaked key looks like."""
        self._retired = [self._key] if keep_previous else []
        self._key = self._new_key()
        return str(self._key.kid)

    def jwks(self) -> dict[str, Any]:
        """The public keys, current first (RFC 7517)."""
        keys = KeySet([self._key, *self._retired])
        return dict(keys.as_dict(private=False))

    def metadata(self) -> dict[str, Any]:
        """What a reader of tokens needs of the discovery document."""
        return {
            "issuer": self.issuer,
            "jwks_uri": f"{self.issuer}/jwks",
            "token_endpoint": f"{self.issuer}/token",
        }

    def _new_key(self) -> RSAKey | ECKey:
        parameters: Any = {"use": "sig", "alg": self.algorithm, "kid": secrets.token_urlsafe(8)}
        key: RSAKey | ECKey
        if self.algorithm == "ES256":
            key = ECKey.generate_key("P-256", parameters)
        else:
            key = RSAKey.generate_key(2048, parameters)
        if self._data_dir is not None:
            _write_key(self._data_dir / KEY_FILE, key)
        return key


def _read_key(path: Path) -> RSAKey | ECKey | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise KeyFileUnsafe(f"{path} can be read by others: delete it to get a new key")
        try:
            data = json.load(file)
            key = RSAKey.import_key(data) if data["kty"] == "RSA" else ECKey.import_key(data)
        except Exception as error:  # whatever is in the file, the remedy is the same
            raise KeyFileUnsafe(f"{path} is damaged: delete it to get a new key") from error
    return key


def _write_key(path: Path, key: RSAKey | ECKey) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(key.as_dict(private=True), file)
    draft.replace(path)
