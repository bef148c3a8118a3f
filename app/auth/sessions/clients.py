"""What the gateway is to an issuer at which people log in: settings, frozen and checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from app.auth.sessions.places import CALLBACK
from app.auth.tokens.issuers import DpopUse, IssuerConfig, IssuerConfigError, without_user

OPENID = "openid"

# What the login itself sets: a setting must not be able to weaken it.
_OURS = frozenset(
    [
        "client_id",
        "client_secret",
        "code_challenge",
        "code_challenge_method",
        "nonce",
        "redirect_uri",
        "request",
        "request_uri",
        "resource",
        "response_mode",
        "response_type",
        "scope",
        "state",
    ]
)
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


class LoginAuth(StrEnum):
    """How the gateway shows itself at the token endpoint."""

    BASIC = "basic"
    POST = "post"
    PRIVATE_KEY_JWT = "private_key_jwt"
    NONE = "none"
    """A public client: PKCE alone ties the code to who began the login."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginClient:
    """The gateway as a client of one issuer. Raises IssuerConfigError.

    `name`: lower case letters, digits and hyphens, shown to people and part of `callback`.
    `secret_file`: the secret, or the private key as PEM; read at each use, so that a replaced one
    counts at once. `key_algorithm`, `key_id`: of that key. `scopes`: what is asked for; `openid`
    always is. `resource`: RFC 8707. `parameters`: others for the authorization endpoint.
    `own_path`: whether answers of this issuer come to a path of their own.
    """

    config: IssuerConfig
    name: str
    client_id: str
    auth: LoginAuth = LoginAuth.NONE
    secret_file: Path | None = None
    key_algorithm: str = "RS256"
    key_id: str | None = None
    scopes: tuple[str, ...] = ()
    resource: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    own_path: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", MappingProxyType(dict(self.parameters)))
        if not _NAME.fullmatch(self.name):
            self._refuse("name", "takes lower case letters, digits and hyphens, 32 at most")
        if not self.client_id:
            self._refuse("client_id", "is empty")
        if (self.auth is LoginAuth.NONE) != (self.secret_file is None):
            self._refuse("client_auth", "a secret or key goes with basic, post or private_key_jwt")
        taken = sorted(_OURS & self.parameters.keys())
        if taken:
            self._refuse("parameters", f"{taken[0]!r} is not for settings")
        if not self.config.algorithms:
            self._refuse("client_id", "ID tokens are signed: the issuer's algorithms are needed")
        if self.config.audience is None:
            self._refuse("client_id", "the issuer has no admin audience")
        if self.config.dpop is DpopUse.REQUIRED:
            self._refuse(
                "client_id", "tokens got here are not bound to a key, and dpop is required"
            )

    @property
    def issuer(self) -> str:
        return self.config.issuer

    @property
    def asked_scope(self) -> str:
        return " ".join(dict.fromkeys((OPENID, *self.scopes)))

    @property
    def callback(self) -> str:
        """The path that its answers come to."""
        return f"{CALLBACK}/{self.name}" if self.own_path else CALLBACK

    def _refuse(self, setting: str, why: str) -> None:
        raise IssuerConfigError(f"issuer {without_user(self.issuer)!r}: login.{setting}: {why}")


class LoginClients:
    """Those of all issuers at which people log in, in the order of the settings."""

    def __init__(self, clients: Iterable[LoginClient]) -> None:
        """Raises IssuerConfigError for two of one name."""
        self._clients: dict[str, LoginClient] = {}
        names: set[str] = set()
        for client in clients:
            if client.name in names:
                raise IssuerConfigError(f"login.name {client.name!r} is there twice")
            names.add(client.name)
            self._clients[client.issuer] = client

    def __iter__(self) -> Iterator[LoginClient]:
        return iter(self._clients.values())

    def __len__(self) -> int:
        return len(self._clients)

    def of(self, issuer: str) -> LoginClient | None:
        return self._clients.get(issuer)


def default_name(issuer: str) -> str:
    """From the issuer's host: `login.example.org` becomes `login-example-org`."""
    host = (urlsplit(issuer).hostname or "issuer").lower()
    return re.sub(r"[^a-z0-9]+", "-", host).strip("-")[:32].strip("-") or "issuer"
