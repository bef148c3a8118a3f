"""Which callers are known without a token, and what each of them shows."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from app.auth.identities.certificates import ServerFiles
from app.auth.identities.secret_files import SecretFile
from app.auth.principal import Principal
from app.auth.tokens.errors import PermissionDenied
from app.clock import Clock
from app.domain.errors import UnknownEngine
from app.domain.scopes import Scope
from app.domain.selectors import Selector

LOCAL_ISSUER = "urn:chadburn:compat-identity"
"""What stands for an issuer in their principals. No issuer of the settings can be called so."""
_GOOD_FOR = timedelta(hours=1)
"""Of an answer that goes on: each request is judged anew."""


class Way(StrEnum):
    """How a caller is known. It stands for the client in its principal, and so in the audit."""

    UNIX_SOCKET = "unix_socket"
    SECRET_PATH = "secret_path"  # noqa: S105 - the name of a way
    MTLS = "mtls"


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """`path` is absolute. `uid`: of the processes that may use it."""

    path: Path
    uid: int


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """A listener for TLS. `names`: DNS names in lower case, or URIs; a certificate has to have one
    of them among its alternative names."""

    host: str
    port: int
    files: ServerFiles
    names: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatIdentity:
    """`name` is the subject of its principal."""

    name: str
    scopes: frozenset[Scope]
    engines: Selector
    shows: UnixSocket | SecretFile | ClientCertificate

    @property
    def way(self) -> Way:
        if isinstance(self.shows, UnixSocket):
            return Way.UNIX_SOCKET
        return Way.SECRET_PATH if isinstance(self.shows, SecretFile) else Way.MTLS

    def principal(self, until: datetime) -> Principal:
        return Principal(
            issuer=LOCAL_ISSUER,
            subject=self.name,
            client_id=self.way,
            scopes=self.scopes,
            engines=self.engines,
            expires_at=until,
        )


@dataclass(frozen=True, slots=True)
class SocketPeer:
    """Whoever has connected to a socket of this machine, as the system says."""

    path: str
    uid: int


@dataclass(frozen=True, slots=True)
class TcpPeer:
    """`address`: of the other end of the connection, whatever a proxy says of others."""

    address: str

    @property
    def is_here(self) -> bool:
        try:
            parsed = ipaddress.ip_address(self.address.partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(parsed, "ipv4_mapped", None)
        return bool((mapped or parsed).is_loopback)


@dataclass(frozen=True, slots=True)
class TlsPeer:
    """Whoever has shown a certificate at the listener of the identity `listener`. `names`: its
    alternative names, DNS ones in lower case. `until`: when it ends."""

    listener: str
    names: frozenset[str]
    until: datetime

    @classmethod
    def of(cls, listener: str, certificate: Mapping[str, Any]) -> TlsPeer:
        """`certificate`: as `ssl.SSLSocket.getpeercert` says it, once it has been verified."""
        names = {
            name.lower() if kind == "DNS" else name
            for kind, name in certificate.get("subjectAltName", ())
            if kind in ("DNS", "URI")
        }
        ends = ssl.cert_time_to_seconds(certificate["notAfter"])
        return cls(listener, frozenset(names), datetime.fromtimestamp(ends, UTC))


Peer = SocketPeer | TcpPeer | TlsPeer


@dataclass(frozen=True, slots=True, kw_only=True)
class Showing:
    """What a request to a compatible endpoint shows besides tokens. `digest`: of the secret in its
    path; None: there is none. `browser`: it has marks that only browsers leave. `direct`: it names
    this machine as its host, and no proxy says that it passed it on."""

    peer: Peer | None
    digest: bytes | None = field(default=None, repr=False)
    browser: bool = False
    direct: bool = False


class IdentityRefused(PermissionDenied):
    """What was shown is right, and came in a way in which it does not count."""

    reason = "IDENTITY_REFUSED"

    def __init__(self, identity: CompatIdentity, message: str) -> None:
        super().__init__(message)
        self.identity = identity


class Identities:
    """Judges what requests to compatible endpoints show. Keeps nothing between them."""

    def __init__(self, identities: Iterable[CompatIdentity], clock: Clock) -> None:
        self._all = tuple(identities)
        self._clock = clock

    def refuse_unknown(self, shown: Showing) -> None:
        """Raises UnknownEngine where a secret was shown that is none, or not from this machine: it
        has to look as if the engine that was meant were not there."""
        if shown.digest is not None and self._by_secret(shown) is None:
            raise UnknownEngine("there is no engine of that id")

    def caller(self, shown: Showing) -> Principal | None:
        """None: nobody is known by that. Raises UnknownEngine, IdentityRefused."""
        self.refuse_unknown(shown)
        now = self._clock.now()
        found, until = self._found(shown), now + _GOOD_FOR
        if found is None:
            return None
        if isinstance(shown.peer, TlsPeer):
            until = min(until, shown.peer.until)
            if until <= now:
                return None
        if shown.browser:
            # It sends certificates, and reaches this machine, at the wish of any page.
            raise IdentityRefused(found, "This is not taken from a browser.")
        if found.way is Way.SECRET_PATH and not shown.direct:
            raise IdentityRefused(
                found, "A secret in the path counts for calls within this machine, by its own name."
            )
        return found.principal(until)

    def _found(self, shown: Showing) -> CompatIdentity | None:
        if shown.digest is not None:
            return self._by_secret(shown)
        peer = shown.peer
        for one in self._all:
            shows = one.shows
            if isinstance(shows, UnixSocket):
                right = peer == SocketPeer(str(shows.path), shows.uid)
            elif isinstance(shows, ClientCertificate) and isinstance(peer, TlsPeer):
                right = peer.listener == one.name and not shows.names.isdisjoint(peer.names)
            else:
                right = False
            if right:
                return one
        return None

    def _by_secret(self, shown: Showing) -> CompatIdentity | None:
        """All are asked, so that the time says nothing of which one it was like. A secret that is
        in two files says nothing of who shows it."""
        assert shown.digest is not None
        found = [
            one
            for one in self._all
            if isinstance(one.shows, SecretFile) and one.shows.has(shown.digest)
        ]
        here = isinstance(shown.peer, TcpPeer) and shown.peer.is_here
        return found[0] if here and len(found) == 1 else None
