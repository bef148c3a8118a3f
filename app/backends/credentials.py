"""What the gateway shows an engine: named entries of the settings, never anything a caller gave.

A registration names an entry. The entry says where it may be used, so that nobody who may register
engines can have it sent to a host of their own.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx2
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.httpx_client import AsyncOAuth2Client

from app.backends.reach import names_host, parse_address
from app.backends.telling import Trouble
from app.clock import Clock
from app.domain.errors import FieldFault, InvalidArgument

log = logging.getLogger(__name__)

_TOKEN = re.compile(r"[\x21-\x7e]{1,16384}")
_FETCH_TIMEOUT_S = 5.0
_ASSUMED_LIFETIME_S = 300
_RENEW_BEFORE_S = 60


class CredentialUnavailable(Exception):
    """There is nothing to show. The text is for an operator's log and holds no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuthClientSettings:
    """Client credentials grant. `parameters`: what the provider wants besides (`resource`,
    `audience`). The token endpoint must be https, or on loopback."""

    token_url: str
    client_id: str
    client_secret_file: Path
    scope: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.token_url)
        if parts.username is not None:
            raise ValueError("token_url must have no user; the secret has a file of its own")
        if parts.scheme == "https" and parts.hostname:
            return
        if parts.scheme == "http" and _is_loopback(parts.hostname or ""):
            return
        raise ValueError("token_url must be https, or http on loopback")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. `authorities` None: those of the system. `certificate` and `key` go together."""

    authorities: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together")


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialSettings:
    """One entry. `bound_to`: host names (`*.example` for those below it), IP literals and socket
    paths of engines that may be shown it; empty: any within the gateway's reach. `server_name`:
    what the engine's certificate must say, whatever the registration asks for."""

    bearer_file: Path | None = None
    oauth: OAuthClientSettings | None = None
    tls: TlsFiles | None = None
    server_name: str | None = None
    bound_to: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.bearer_file is not None and self.oauth is not None:
            raise ValueError("a credential has a bearer file or an OAuth client, not both")


class Bearer(Protocol):
    async def token(self) -> str:
        """Raises CredentialUnavailable."""

    def forget(self) -> None:
        """The engine refused it: ask for a new one next time."""

    async def close(self) -> None: ...


class FileBearer:
    """Read again whenever the file was replaced, as secrets that are mounted are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = ""
        self._seen: FileStamp = None

    async def token(self) -> str:
        try:
            seen = stamp(self._path)
            if seen is None or seen != self._seen:
                self._token = _checked(self._path.read_text(encoding="ascii").strip())
                self._seen = seen
        except (OSError, ValueError) as error:
            self._seen = None
            raise CredentialUnavailable(f"bearer file: {type(error).__name__}") from error
        return self._token

    def forget(self) -> None:
        self._seen = None

    async def close(self) -> None:
        """Nothing is held."""


class OAuthBearer:
    """A token of the gateway's own, renewed before it ends. One request at a time."""

    def __init__(self, settings: OAuthClientSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._client: AsyncOAuth2Client | None = None
        self._lock = asyncio.Lock()
        self._trouble = Trouble(log, f"token of {settings.client_id} for engines")
        self._token = ""
        self._renew_at: datetime | None = None
        self._ends_at: datetime | None = None

    async def token(self) -> str:
        async with self._lock:
            now = self._clock.now()
            if self._renew_at is not None and now < self._renew_at:
                return self._token
            try:
                await self._fetch(now)
            except CredentialUnavailable:
                if self._ends_at is None or now >= self._ends_at:
                    raise
                said = "it could not be renewed; the old one still holds"
                self._trouble.seen(logging.WARNING, said)
            else:
                self._trouble.over()
            return self._token

    def forget(self) -> None:
        self._renew_at = self._ends_at = None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _fetch(self, now: datetime) -> None:
        wanted = self._settings
        try:
            if self._client is None:
                self._client = AsyncOAuth2Client(
                    client_id=wanted.client_id,
                    client_secret=wanted.client_secret_file.read_text(encoding="utf-8").strip(),
                    scope=wanted.scope,
                    timeout=_FETCH_TIMEOUT_S,
                )
            answer: Mapping[str, Any] = await self._client.fetch_token(
                wanted.token_url, grant_type="client_credentials", **wanted.parameters
            )
            if str(answer.get("token_type", "")).lower() != "bearer":
                raise ValueError("not a bearer token")
            token = _checked(str(answer.get("access_token") or ""))
            lifetime_s = int(answer.get("expires_in") or _ASSUMED_LIFETIME_S)
        except (OSError, ValueError, TypeError, httpx2.HTTPError, AuthlibBaseError) as error:
            # A new client next time: the secret may have been replaced.
            await self.close()
            raise CredentialUnavailable(f"token endpoint: {type(error).__name__}") from error
        self._token = token
        self._ends_at = now + timedelta(seconds=lifetime_s)
        self._renew_at = self._ends_at - timedelta(seconds=min(_RENEW_BEFORE_S, lifetime_s // 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """An entry ready for use at one engine. `encrypted` False: plaintext."""

    bearer: Bearer | None = None
    tls: TlsFiles | None = None
    server_name: str | None = None

    @property
    def encrypted(self) -> bool:
        return self.tls is not None


class Credentials:
    """All entries of the settings, by name."""

    def __init__(self, entries: Mapping[str, CredentialSettings], clock: Clock) -> None:
        self._entries = dict(entries)
        self._bearers: dict[str, Bearer] = {}
        for name, entry in self._entries.items():
            if entry.bearer_file is not None:
                self._bearers[name] = FileBearer(entry.bearer_file)
            elif entry.oauth is not None:
                self._bearers[name] = OAuthBearer(entry.oauth, clock)

    def of(
        self, name: str | None, server_name: str | None, addresses: tuple[str, ...]
    ) -> Credential:
        """The entry for use at those addresses. A server name alone asks for TLS with the
        system's authorities.

        Raises InvalidArgument: no such entry, or one that is bound to another place or name.
        """
        if name is None:
            tls = TlsFiles() if server_name is not None else None
            return Credential(tls=tls, server_name=server_name)
        entry = self._entries.get(name)
        if entry is None:
            raise _fault("/tls/credential", "no credential of that name is configured")
        for address in addresses:
            _check_bound(entry, address)
        if server_name is not None and entry.server_name not in (None, server_name):
            raise _fault("/tls/server_name", "this credential is bound to another server name")
        named = entry.server_name or server_name
        tls = entry.tls or (TlsFiles() if named is not None else None)
        return Credential(bearer=self._bearers.get(name), tls=tls, server_name=named)

    async def close(self) -> None:
        for bearer in self._bearers.values():
            await bearer.close()


def _check_bound(entry: CredentialSettings, address: str) -> None:
    if not entry.bound_to:
        return
    parsed = parse_address(address)
    if parsed.socket:
        # As it is written: the reach policy has resolved its links for the gateway as a whole.
        allowed = parsed.socket in entry.bound_to
    else:
        allowed = names_host(entry.bound_to, parsed.host)
    if not allowed:
        raise _fault("/tls/credential", "this credential is bound to other addresses")


def _fault(pointer: str, detail: str) -> InvalidArgument:
    return InvalidArgument(detail, faults=(FieldFault(pointer, detail),))


def _checked(token: str) -> str:
    if not _TOKEN.fullmatch(token):
        raise ValueError("not a token")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


FileStamp = tuple[int, int, int] | None
"""Another one when the file is; None: it is not there."""


def stamp(path: Path) -> FileStamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)


def belong_together(certificate: Path, key: Path) -> bool:
    """Not between the moments at which the one and the other are replaced."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, lambda: b"")
    except (OSError, ValueError):  # ssl.SSLError is an OSError
        return False
    return True


def read_pem(path: Path | None) -> bytes | None:
    """Raises CredentialUnavailable."""
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialUnavailable(f"TLS file: {type(error).__name__}") from error
