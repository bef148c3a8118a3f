"""What is trusted about one issuer of tokens: settings, frozen and checked."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from urllib.parse import urlsplit

from app.domain.scopes import Scope

# Asymmetric only: with HS* every verifier could also mint, and a verifier that accepts both kinds
# can be handed a token whose HMAC key is the issuer's public key.
SUPPORTED_ALGORITHMS = frozenset(
    [
        "RS256",
        "RS384",
        "RS512",
        "PS256",
        "PS384",
        "PS512",
        "ES256",
        "ES384",
        "ES512",
        "EdDSA",
        "Ed25519",
    ]
)
MAX_LEEWAY_S = 300


class TokenProfile(StrEnum):
    """How an access token is told from the issuer's other tokens."""

    STRICT = "strict"
    """RFC 9068: header ``typ`` ``at+jwt``; client_id, iat and jti required."""
    COMPATIBLE = "compatible"
    """Issuers whose access tokens say ``JWT`` or nothing: must show a mark of an access token
    and none of an ID token."""


class RoleUse(StrEnum):
    """What mapped roles do to the scopes of a token that also has a scope claim."""

    CAP = "cap"
    """Both must allow: a person's roles never widen what was granted to the client."""
    ADD = "add"
    """Either grants."""


class IssuerConfigError(ValueError):
    """Issuer settings that must not be started with; the message names setting and issuer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMap:
    """Roles at one place of the token, and the scopes each stands for."""

    claim: str | tuple[str, ...]
    """Path to a string or list of strings: ``"realm_access.roles"``, or a tuple of names where a
    name itself has dots."""
    scopes: Mapping[str, frozenset[Scope]]

    def __post_init__(self) -> None:
        if not self.path or not all(self.path):
            raise IssuerConfigError("role map: the claim path is empty")
        for role, granted in self.scopes.items():
            if not role or not all(isinstance(s, Scope) for s in granted):
                raise IssuerConfigError(f"role map {role!r}: not a role with known scopes")
        object.__setattr__(self, "scopes", MappingProxyType(dict(self.scopes)))

    @property
    def path(self) -> tuple[str, ...]:
        """The claim path as names from the top of the token."""
        return _path_of(self.claim)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerConfig:
    """One trusted issuer. Raises :class:`IssuerConfigError` for settings that are not safe."""

    issuer: str
    """Compared byte for byte with ``iss`` and with the discovery document."""
    audience: str | None = None
    """The admin audience; None where only inference tokens are taken (an engine's inference
    listener)."""
    inference_audiences: tuple[str, ...] = ()
    """Audiences whose tokens are genuine but may never administer."""
    jwks_uri: str | None = None
    """Where the keys are; None asks the issuer's discovery document."""
    algorithms: tuple[str, ...] = ("RS256", "ES256")
    profile: TokenProfile = TokenProfile.STRICT
    scope_claims: tuple[str, ...] = ("scope",)
    """Top-level claims with scopes: a space-separated string or a list of strings."""
    role_maps: tuple[RoleMap, ...] = ()
    role_use: RoleUse = RoleUse.CAP
    client_id_claims: tuple[str, ...] = ("client_id",)
    """The first that is present names the client."""
    group_claims: tuple[str | tuple[str, ...], ...] = ()
    """Paths to strings or lists of strings, written as in a role map: its groups."""
    leeway_s: int = 30
    """Clock skew allowed on exp, nbf and iat."""

    def __post_init__(self) -> None:
        self._check_addresses()
        self._check_audiences()
        if not self.algorithms:
            self._refuse("algorithms", "at least one is needed")
        for name in self.algorithms:
            if name not in SUPPORTED_ALGORITHMS:
                self._refuse("algorithms", f"{name!r} is not an allowed asymmetric algorithm")
        if not 0 <= self.leeway_s <= MAX_LEEWAY_S:
            self._refuse("leeway_s", f"must be within 0..{MAX_LEEWAY_S}")
        if not self.scope_claims and not self.role_maps:
            self._refuse("scope_claims", "no source of scopes: neither claims nor role maps")
        if not all(self.scope_claims) or not all(self.client_id_claims):
            self._refuse("claims", "a claim name is empty")
        if not all(path and all(path) for path in self.group_paths):
            self._refuse("group_claims", "a claim path is empty")
        if self.profile is TokenProfile.STRICT and "client_id" not in self.client_id_claims:
            self._refuse("client_id_claims", "the strict profile reads 'client_id'")

    @property
    def group_paths(self) -> tuple[tuple[str, ...], ...]:
        """The group claims as names from the top of the token."""
        return tuple(map(_path_of, self.group_claims))

    @property
    def loopback(self) -> bool:
        """Whether the issuer lives on this machine, the one case in which http is allowed."""
        return is_loopback_host(urlsplit(self.issuer).hostname or "")

    def _check_addresses(self) -> None:
        needs = "needs an https URL (http only to loopback) without user, query or fragment"
        if not is_allowed_url(self.issuer, allow_http=True) or urlsplit(self.issuer).query:
            self._refuse("issuer", needs)
        if self.jwks_uri is not None and not is_allowed_url(
            self.jwks_uri, allow_http=self.loopback
        ):
            self._refuse("jwks_uri", needs)

    def _check_audiences(self) -> None:
        if self.audience == "" or "" in self.inference_audiences:
            self._refuse("audience", "an audience is empty")
        if self.audience is None and not self.inference_audiences:
            self._refuse("audience", "neither an admin nor an inference audience is set")
        if self.audience in self.inference_audiences:
            # The whole separation of the two surfaces rests on these being different.
            self._refuse("inference_audiences", "holds the admin audience too")

    def _refuse(self, setting: str, why: str) -> None:
        raise IssuerConfigError(f"issuer {self.issuer!r}: {setting}: {why}")


def _path_of(claim: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(claim.split(".")) if isinstance(claim, str) else claim


def is_loopback_host(host: str) -> bool:
    """Whether a URL's host is this machine by name (``localhost``) or by literal address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_allowed_url(url: str, *, allow_http: bool) -> bool:
    """Whether keys or metadata may be fetched from ``url``: https, or http to loopback."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
        parts.port  # noqa: B018 - raises ValueError for a port out of range
    except ValueError:
        return False
    if not host or parts.username is not None or parts.fragment:
        return False
    return parts.scheme == "https" or (
        allow_http and parts.scheme == "http" and is_loopback_host(host)
    )
