"""What is trusted about one issuer of tokens: settings, frozen and checked."""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
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
MAX_INTROSPECTION_CACHE_S = 300


class TokenProfile(StrEnum):
    """How an access token is told from the issuer's other tokens."""

    STRICT = "strict"
    """RFC 9068: header ``typ`` ``at+jwt``; client_id, iat and jti required."""
    COMPATIBLE = "compatible"
    """Issuers whose access tokens say ``JWT`` or nothing: must show a mark of an access token
    and none of an ID token."""
    CROSS_CLIENT = "cross_client"
    """Dex, whose access tokens have all that its ID tokens have: must have been got by one client
    for another, whose id is the audience."""


class PersonProof(StrEnum):
    """What shows that a person stands behind a token, beside a client id that is not the subject
    and no mark of a program."""

    SUBJECT = "subject"
    """That is enough: client credentials of this issuer have the client as their subject."""
    CLAIMS = "claims"
    """A claim that only people's tokens have: programs of this issuer have accounts of their
    own."""


class RoleUse(StrEnum):
    """What mapped roles do to the scopes of a token that also has a scope claim."""

    CAP = "cap"
    """Both must allow: a person's roles never widen what was granted to the client."""
    ADD = "add"
    """Either grants."""


class Introspected(StrEnum):
    """Which tokens an issuer is asked about."""

    OPAQUE = "opaque"
    """Those that are no JWT; its JWTs are judged by its keys alone."""
    JWT = "jwt"
    """Its JWTs, once their signature is known to be its own."""
    ALL = "all"


class ClientAuth(StrEnum):
    """How the gateway shows itself at the introspection endpoint (RFC 6749 §2.3.1)."""

    BASIC = "basic"
    POST = "post"


class DpopUse(StrEnum):
    """Whether an issuer's tokens may, or must, be bound to a key of the caller (RFC 9449)."""

    OFF = "off"
    """Bound tokens are refused: nothing here could see whether the caller holds the key."""
    ALLOWED = "allowed"
    REQUIRED = "required"
    """Plain bearer tokens of the issuer are refused."""


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
class IntrospectionConfig:
    """Asking the issuer about a token (RFC 7662)."""

    client_id: str
    client_secret_file: Path
    """Read at each question, so that a replaced secret counts at once."""
    endpoint: str | None = None
    """None asks the issuer's discovery document."""
    tokens: Introspected = Introspected.OPAQUE
    client_auth: ClientAuth = ClientAuth.BASIC
    cache_s: int = 30
    """How long an answer counts, never past the token's own end: as long a revoked token may
    still be taken."""

    @property
    def opaque(self) -> bool:
        return self.tokens is not Introspected.JWT

    @property
    def jwt(self) -> bool:
        return self.tokens is not Introspected.OPAQUE


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
    """Empty, beside introspection of opaque tokens: the issuer's JWTs are not taken, and its keys
    are never fetched."""
    profile: TokenProfile = TokenProfile.STRICT
    scope_claims: tuple[str, ...] = ("scope",)
    """Top-level claims with scopes: a space-separated string or a list of strings."""
    scope_prefix: str = ""
    """Stands before each scope in those claims; what has none is ignored."""
    role_maps: tuple[RoleMap, ...] = ()
    role_use: RoleUse = RoleUse.CAP
    client_id_claims: tuple[str, ...] = ("client_id",)
    """The first that is present names the client."""
    group_claims: tuple[str | tuple[str, ...], ...] = ()
    """Paths to strings or lists of strings, written as in a role map: its groups."""
    subject_claims: tuple[str, ...] = ("sub",)
    """The first that is present names the subject."""
    clients_without_audience: tuple[str, ...] = ()
    """Clients whose access tokens count as made for the admin audience where they have no ``aud``
    and say by ``token_use`` what they are."""
    persons: PersonProof | None = None
    """None: SUBJECT in the strict profile, CLAIMS in the others."""
    leeway_s: int = 30
    """Clock skew allowed on exp, nbf and iat."""
    introspection: IntrospectionConfig | None = None
    dpop: DpopUse = DpopUse.OFF
    dpop_nonce: bool = False
    """Whether proofs have to repeat a nonce of ours."""

    def __post_init__(self) -> None:
        self._check_addresses()
        self._check_audiences()
        if not self.algorithms and not (self.introspection and not self.introspection.jwt):
            self._refuse("algorithms", "at least one is needed")
        for name in self.algorithms:
            if name not in SUPPORTED_ALGORITHMS:
                self._refuse("algorithms", f"{name!r} is not an allowed asymmetric algorithm")
        if not 0 <= self.leeway_s <= MAX_LEEWAY_S:
            self._refuse("leeway_s", f"must be within 0..{MAX_LEEWAY_S}")
        if not self.scope_claims and not self.role_maps:
            self._refuse("scope_claims", "no source of scopes: neither claims nor role maps")
        if not all((*self.scope_claims, *self.client_id_claims, *self.subject_claims)):
            self._refuse("claims", "a claim name is empty")
        if self.dpop_nonce and self.dpop is DpopUse.OFF:
            self._refuse("dpop_nonce", "goes with dpop: no proof is looked at without")
        if not all(path and all(path) for path in self.group_paths):
            self._refuse("group_claims", "a claim path is empty")
        if not self.subject_claims:
            self._refuse("subject_claims", "at least one is needed")
        if self.profile is TokenProfile.STRICT and "client_id" not in self.client_id_claims:
            self._refuse("client_id_claims", "the strict profile reads 'client_id'")
        if self.profile is TokenProfile.CROSS_CLIENT and not self.client_id_claims:
            self._refuse("client_id_claims", "the cross_client profile needs one")

    @property
    def person_proof(self) -> PersonProof:
        if self.persons is not None:
            return self.persons
        strict = self.profile is TokenProfile.STRICT
        return PersonProof.SUBJECT if strict else PersonProof.CLAIMS

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
        if self.introspection is not None:
            self._check_introspection(self.introspection, needs)

    def _check_introspection(self, asks: IntrospectionConfig, needs: str) -> None:
        if not asks.client_id:
            self._refuse("introspection.client_id", "is empty")
        if asks.endpoint is not None and not is_allowed_url(
            asks.endpoint, allow_http=self.loopback
        ):
            self._refuse("introspection.endpoint", needs)
        if not 0 <= asks.cache_s <= MAX_INTROSPECTION_CACHE_S:
            self._refuse("introspection.cache_s", f"must be within 0..{MAX_INTROSPECTION_CACHE_S}")

    def _check_audiences(self) -> None:
        if self.audience == "" or "" in self.inference_audiences:
            self._refuse("audience", "an audience is empty")
        if self.audience is None and not self.inference_audiences:
            self._refuse("audience", "neither an admin nor an inference audience is set")
        if self.audience in self.inference_audiences:
            # The whole separation of the two surfaces rests on these being different.
            self._refuse("inference_audiences", "holds the admin audience too")
        if self.clients_without_audience and (
            self.audience is None or self.profile is not TokenProfile.COMPATIBLE
        ):
            self._refuse(
                "clients_without_audience", "needs an admin audience and the compatible profile"
            )
        if "" in self.clients_without_audience:
            self._refuse("clients_without_audience", "a client id is empty")

    def _refuse(self, setting: str, why: str) -> None:
        raise IssuerConfigError(f"issuer {without_user(self.issuer)!r}: {setting}: {why}")


def without_user(url: str) -> str:
    """The URL for a log or a terminal: with what stands before an `@` goes what may be a secret."""
    scheme, mark, rest = url.partition("//")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}" if mark else url.rpartition("@")[2]


def _path_of(claim: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(claim.split(".")) if isinstance(claim, str) else claim


def refuse_conflicts(configs: Iterable[IssuerConfig]) -> None:
    """Raises IssuerConfigError for issuers that cannot be trusted beside one another.

    An opaque token does not say whose it is, and to ask several issuers would show each of them
    the tokens of the others: so one at most is asked about them.
    """
    known: set[str] = set()
    asked: str | None = None
    for config in configs:
        if config.issuer in known:
            raise IssuerConfigError(f"issuer {config.issuer!r} is configured twice")
        known.add(config.issuer)
        if config.introspection is not None and config.introspection.opaque:
            if asked is not None:
                raise IssuerConfigError(
                    f"issuers {asked!r} and {config.issuer!r}: introspection.tokens: one issuer "
                    "at most may be asked about opaque tokens"
                )
            asked = config.issuer
    if not known:
        raise IssuerConfigError("no token issuer is configured")


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
