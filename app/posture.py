"""What this gateway would be open to, read off its settings and its routes. Pure: it looks nowhere.

It refuses nothing: what is not safe at all is refused where it is read. Here stands what may be
meant, and what somebody who answers for the gateway should know of.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from app.auth.tokens.issuers import is_loopback_host, without_user
from app.domain.engine import Registration
from app.settings import CompatIdentitySettings, CredentialSettings, IssuerSettings, Settings

DOES_NOT_START = "DOES_NOT_START"
_DAY_S = 86_400
_MANY_ADDRESSES = 1 << 20
_LEAST_PREFIX = 8
"""The networks that are nobody's but their owner's are no larger (10.0.0.0/8, fd00::/8)."""
_VERIFIED = ("verify-ca", "verify-full")


@dataclass(frozen=True, slots=True)
class RouteNeed:
    """`scopes` None: open to all; empty: any token that may administer at all. `person`: and it
    has to be a person's. `of_kind`: and the scope that the operation's own kind takes."""

    method: str
    path: str
    scopes: tuple[str, ...] | None
    person: bool = False
    of_kind: bool = False


@dataclass(frozen=True, slots=True)
class Listener:
    """`plaintext`: what arrives there is not encrypted by this process."""

    name: str
    address: str
    loopback: bool
    plaintext: bool
    tokens: bool


@dataclass(frozen=True, slots=True)
class Trust:
    """An issuer, as far as it matters who is let in. `asked`: about which tokens, if it is asked
    about any. `dpop`: whether tokens may, or must, be bound to a key. `login`: people log in there
    with a browser."""

    issuer: str
    audience: str | None
    profile: str
    algorithms: tuple[str, ...]
    asked: str | None
    dpop: str
    login: bool


@dataclass(frozen=True, slots=True)
class Known:
    """A caller of compatible endpoints that sends no token. `way`: what proves it. `engines`: in
    words of the settings."""

    name: str
    way: str
    place: str
    scopes: tuple[str, ...]
    engines: str


@dataclass(frozen=True, slots=True)
class Link:
    """How an engine is reached."""

    engine: str
    encrypted: bool
    loopback: bool
    credential: str | None


@dataclass(frozen=True, slots=True)
class Remark:
    """`code` is stable. `about`: which part of the settings, or which engine."""

    code: str
    about: str
    message: str


@dataclass(frozen=True, slots=True)
class Posture:
    """`engines` None: nobody could look into the register."""

    listeners: tuple[Listener, ...]
    issuers: tuple[Trust, ...]
    identities: tuple[Known, ...]
    routes: tuple[RouteNeed, ...]
    engines: tuple[Link, ...] | None
    warnings: tuple[Remark, ...]


def posture_of(
    settings: Settings,
    routes: Iterable[RouteNeed],
    engines: Iterable[Registration] | None = None,
) -> Posture:
    table = tuple(sorted(routes, key=lambda route: (route.path, route.method)))
    links = None if engines is None else tuple(_link(one, settings) for one in engines)
    warnings = (
        *_of_listeners(settings),
        *_of_issuers(settings.issuers),
        *_of_callers(settings),
        *_of_identities(settings),
        *_of_payloads(settings),
        *_of_reach(settings),
        *_of_credentials(settings.engine_credentials),
        *_of_database(settings),
        *_of_links(links or ()),
    )
    return Posture(
        _listeners(settings),
        _trusted(settings),
        tuple(map(_known, settings.compat_identity)),
        table,
        links,
        warnings,
    )


def _listeners(settings: Settings) -> tuple[Listener, ...]:
    found = [
        Listener(
            "http",
            _at(settings.host, settings.port),
            is_loopback_host(settings.host),
            plaintext=True,
            tokens=True,
        )
    ]
    if settings.metrics_port is not None:
        address = _at(settings.metrics_host, settings.metrics_port)
        here = is_loopback_host(settings.metrics_host)
        found.append(Listener("metrics", address, here, plaintext=True, tokens=False))
    for one in settings.compat_identity:
        name = f"compat_identity {one.name}"
        if one.unix_socket is not None:
            path = str(one.unix_socket)
            found.append(Listener(name, path, loopback=True, plaintext=True, tokens=True))
        elif one.tls is not None:
            here = is_loopback_host(_host_of(one.tls.listen))
            found.append(Listener(name, one.tls.listen, here, plaintext=False, tokens=True))
    return tuple(found)


def _known(one: CompatIdentitySettings) -> Known:
    way, place = "secret_path", "the gateway's own listener, from this machine"
    if one.unix_socket is not None:
        way, place = "unix_socket", str(one.unix_socket)
    elif one.tls is not None:
        way, place = "mtls", f"{one.tls.listen}: {' '.join(one.tls.names)}"
    engines = one.engines if isinstance(one.engines, str) else json.dumps(one.engines)
    return Known(one.name, way, place, tuple(sorted(one.scopes)), engines)


def _host_of(listen: str) -> str:
    return listen.rpartition(":")[0].strip("[]")


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _trusted(settings: Settings) -> tuple[Trust, ...]:
    return tuple(
        Trust(
            without_user(one.issuer),
            one.audience or settings.audience,
            one.profile,
            one.algorithms,
            None if one.introspection is None else one.introspection.tokens,
            one.dpop,
            one.login is not None,
        )
        for one in settings.issuers
    )


def _of_listeners(settings: Settings) -> Iterator[Remark]:
    # On loopback it may still be there for others, by way of what is in front of it.
    listens = not is_loopback_host(settings.host)
    if listens or not is_loopback_host(urlsplit(settings.base_url).hostname or ""):
        if settings.base_url.startswith("http:"):
            yield Remark(
                "PLAINTEXT_BEYOND_LOOPBACK",
                "host" if listens else "public_url",
                "tokens arrive unencrypted from other machines; put TLS in front, and say so with "
                "an https public_url",
            )
        elif not settings.trusted_proxies:
            yield Remark(
                "PROXY_NOT_NAMED",
                "trusted_proxies",
                "whatever ends TLS in front of this is taken for the caller, in the audit and for "
                "rates",
            )
    if any(_is_everybody(proxy) for proxy in settings.trusted_proxies):
        yield Remark(
            "ANYBODY_IS_A_PROXY",
            "trusted_proxies",
            "every caller can state an address of its own choice",
        )
    if settings.metrics_port is not None and not is_loopback_host(settings.metrics_host):
        yield Remark(
            "METRICS_BEYOND_LOOPBACK",
            "metrics_host",
            "figures, with the ids of engines, are shown to other machines without a token",
        )


def _of_issuers(issuers: tuple[IssuerSettings, ...]) -> Iterator[Remark]:
    for one in issuers:
        about = f"issuers {without_user(one.issuer)}"
        if one.issuer.startswith("http:"):
            yield Remark("ISSUER_IN_PLAINTEXT", about, "for development: its keys come unencrypted")
        if one.profile == "compatible":
            yield Remark(
                "COMPATIBLE_PROFILE",
                about,
                "access tokens are told from others by their claims, not by their type",
            )
        if one.role_maps and one.role_use == "add":
            yield Remark(
                "ROLES_ADD_SCOPES",
                about,
                "a role gives scopes that the token was not issued for",
            )


def _of_callers(settings: Settings) -> Iterator[Remark]:
    if settings.clients_may_settle:
        yield Remark(
            "PROGRAMS_MAY_SETTLE",
            "clients_may_settle",
            "a program may state how an operation ended",
        )
    for name in (
        "max_refusals_per_minute",
        "max_changes_per_s",
        "max_changes_per_s_of_address",
    ):
        if getattr(settings, name) == 0:
            yield Remark("NO_RATE", name, "there is no limit")
    logins = any(one.login for one in settings.issuers)
    if logins and settings.browser_sessions.longest_s > _DAY_S:
        yield Remark(
            "SESSIONS_LAST_LONG",
            "browser_sessions",
            "a browser that somebody else gets hold of stays logged in for days",
        )
    if settings.log_level == "debug":
        yield Remark("DEBUG_LOG", "log_level", "meant for looking for a fault, not for good")


def _of_identities(settings: Settings) -> Iterator[Remark]:
    for one in settings.compat_identity:
        about = f"compat_identity {one.name}"
        if one.secret_file is not None:
            yield Remark(
                "SECRET_IN_PATH",
                about,
                "whoever sees the address has the secret: it ends in settings, logs and process "
                "lists of its clients",
            )
            if not is_loopback_host(urlsplit(settings.base_url).hostname or ""):
                yield Remark(
                    "SECRET_PATH_BEHIND_PROXY",
                    about,
                    "to the gateway a proxy on this machine is this machine; let it pass nothing "
                    "below /compat on that has a ~ in it",
                )
        if one.engines == "all":
            yield Remark("IDENTITY_ON_ALL_ENGINES", about, "name the engines that it is for")
        if "admin:weights.unsafe" in one.scopes:
            yield Remark(
                "IDENTITY_UNSAFE", about, "without a token, it may have engines unpickle payloads"
            )


def _of_payloads(settings: Settings) -> Iterator[Remark]:
    for one in settings.engine_payloads:
        named = {"engines": list(one.engines), "labels": one.labels}
        said = json.dumps({name: value for name, value in named.items() if value})
        yield Remark(
            "ENGINE_PAYLOADS_ON",
            f"engine_payloads {said}",
            "who has admin:weights.unsafe there may have engines unpickle what they send, and so "
            "run code in them",
        )


def _of_reach(settings: Settings) -> Iterator[Remark]:
    reach = settings.engine_reach
    if reach.allow_plaintext_beyond_loopback:
        yield Remark(
            "ENGINES_IN_PLAINTEXT",
            "engine_reach",
            "orders and weights may go to engines on other machines unencrypted",
        )
    for cidr in reach.cidrs:
        try:
            network = ipaddress.ip_network(cidr, strict=False)
        except ValueError:
            continue  # refused at the start
        if network.num_addresses > _MANY_ADDRESSES and not network.is_loopback:
            yield Remark("WIDE_REACH", "engine_reach", f"{cidr} is a great many addresses")
    if "*" in reach.hosts or any(host.count(".") == 1 and host[0] == "*" for host in reach.hosts):
        yield Remark("WIDE_REACH", "engine_reach", "a name matches whole domains")
    if reach.hosts and not reach.cidrs:
        yield Remark(
            "NAMES_ALONE",
            "engine_reach",
            "whoever answers for these names says where engines are; cidrs would hold them to it",
        )


def _of_credentials(entries: Mapping[str, CredentialSettings]) -> Iterator[Remark]:
    for name, entry in entries.items():
        about = f"engine_credentials {name}"
        if not entry.bound_to:
            yield Remark(
                "CREDENTIAL_NOT_BOUND", about, "it may be shown to any engine within the reach"
            )
        if entry.tls is None and entry.server_name is None:
            yield Remark(
                "CREDENTIAL_WITHOUT_TLS", about, "it is shown unencrypted where the engine allows"
            )


def _of_database(settings: Settings) -> Iterator[Remark]:
    try:
        parts = urlsplit(settings.ledger_url)
        named = parts.hostname or ""
    except ValueError:
        return  # none that could be used
    if not parts.scheme.startswith("postgresql"):
        return
    query = parse_qs(parts.query)
    host = (query.get("host") or [named])[0]
    if not host or host.startswith("/") or is_loopback_host(host):
        return
    if (query.get("sslmode") or [""])[0] not in _VERIFIED:
        yield Remark(
            "DATABASE_NOT_VERIFIED",
            "database_url",
            "the server's certificate is not checked; set sslmode=verify-full",
        )


def _of_links(links: Iterable[Link]) -> Iterator[Remark]:
    for link in links:
        about = f"engine {link.engine}"
        if not link.encrypted and not link.loopback:
            yield Remark("ENGINE_WITHOUT_TLS", about, "it is reached unencrypted")
        if link.credential is None and not link.loopback:
            yield Remark(
                "ENGINE_WITHOUT_CREDENTIAL", about, "it is shown no credential: who else may order?"
            )


def _link(registration: Registration, settings: Settings) -> Link:
    tls = registration.tls
    entry = settings.engine_credentials.get(tls.credential or "")
    named = tls.server_name is not None
    encrypted = named or (entry is not None and bool(entry.tls or entry.server_name))
    addresses = {address for one in registration.members for address in (one.admin, one.control)}
    here = all(
        address.startswith("unix:") or is_loopback_host(address.rpartition(":")[0].strip("[]"))
        for address in addresses
    )
    return Link(registration.id, encrypted, here, tls.credential)


def _is_everybody(proxy: str) -> bool:
    try:
        return proxy == "*" or ipaddress.ip_network(proxy, strict=False).prefixlen < _LEAST_PREFIX
    except ValueError:
        return False
