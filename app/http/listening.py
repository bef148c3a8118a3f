"""Where the gateway listens: at its own address, and at those of callers known without a token."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from app.auth.identities.certificates import LiveCertificates
from app.auth.identities.known import ClientCertificate, CompatIdentity, UnixSocket
from app.http.listeners import SocketRefused, TlsListener, unix_socket
from app.http.server import bound


class ListenRefused(Exception):
    """One line for whoever starts the process."""

    def __init__(self, where: object, why: object) -> None:
        super().__init__(f"cannot listen on {where}: {why}")


@dataclass(frozen=True, slots=True)
class Listening:
    """`sockets`: of this machine. `tls`: by the identity whose listener it is."""

    sockets: tuple[socket.socket, ...]
    tls: dict[str, tuple[socket.socket, LiveCertificates]]

    def tls_listeners(self) -> tuple[TlsListener, ...]:
        """To be called in the event loop."""
        return tuple(TlsListener(name, *one) for name, one in self.tls.items())


def bound_at(host: str, port: int) -> socket.socket:
    """Raises ListenRefused."""
    try:
        return bound(host, port)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else "no such address"
        raise ListenRefused(f"{host}:{port}", why) from error


@contextmanager
def listening(identities: Iterable[CompatIdentity]) -> Iterator[Listening]:
    """What identities come by, beside the gateway's own listener. Raises ListenRefused."""
    with ExitStack() as held:
        sockets: list[socket.socket] = []
        tls: dict[str, tuple[socket.socket, LiveCertificates]] = {}
        for one in identities:
            shows = one.shows
            if isinstance(shows, UnixSocket):
                try:
                    sockets.append(held.enter_context(unix_socket(shows)))
                except (SocketRefused, OSError) as error:
                    why = error.strerror if isinstance(error, OSError) else error
                    raise ListenRefused(shows.path, why) from error
            elif isinstance(shows, ClientCertificate):
                listener = held.enter_context(bound_at(shows.host, shows.port))
                try:
                    tls[one.name] = (listener, LiveCertificates(shows.files))
                except (OSError, ValueError) as error:  # were good a moment ago
                    raise ListenRefused(shows.host, "its files of TLS have changed") from error
        yield Listening(tuple(sockets), tls)
