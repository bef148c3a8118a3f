"""From whom an engine fetches KV: addresses on a list, looked at again once they are resolved."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

_Network = IPv4Network | IPv6Network
_Address = IPv4Address | IPv6Address
_LOOPBACK = ("127.0.0.0/8", "::1/128")


class PeerRefused(Exception):
    """The address is not on the list, or is none."""


@dataclass(frozen=True, slots=True)
class _Peer:
    network: _Network
    port: int | None


class PeerList:
    """``entries``: an address or a network, with or without a port: ``10.0.3.7``, ``10.0.3.0/24``,
    ``10.0.3.7:7100``, ``[fd00::7]:7100``. Without any: this machine alone."""

    def __init__(self, entries: Iterable[str] = (), *, beyond_loopback: bool = False) -> None:
        """What is fetched is authenticated, and not encrypted: peers beyond this machine have to be
        allowed by ``beyond_loopback`` too. Raises ValueError."""
        self._peers = tuple(_peer(entry) for entry in entries) or tuple(map(_peer, _LOOPBACK))
        if not beyond_loopback:
            for peer in self._peers:
                if not peer.network.is_loopback:
                    raise ValueError(f"{peer.network} is beyond this machine")

    async def resolved(self, host: str, port: int) -> str:
        """An address of that host which is on the list, to connect to as it is: a name could mean
        another one a moment later. Raises PeerRefused or OSError."""
        if not 0 < port < 65536:
            raise PeerRefused("a port is above 0 and below 65536")
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise PeerRefused("not a host") from error
        for *_, place in found:
            address = str(place[0])
            if self._allows(ip_address(address.partition("%")[0]), port):
                return address
        raise PeerRefused(f"{host}:{port} is not among the peers that KV is fetched from")

    def _allows(self, address: _Address, port: int) -> bool:
        return any(
            address in peer.network and peer.port in (None, port)
            for peer in self._peers
            if peer.network.version == address.version
        )


def _peer(entry: str) -> _Peer:
    host, port = entry, None
    if entry.startswith("[") and "]" in entry:
        host, _, rest = entry[1:].partition("]")
        port = rest.removeprefix(":") if rest else None
    elif entry.count(":") == 1:
        host, port = entry.split(":")
    try:
        number = None if port is None else int(port)
        network = ip_network(host)
    except ValueError as error:
        raise ValueError(f"not an address or network of peers: {entry!r}") from error
    if number is not None and not 0 < number < 65536:
        raise ValueError(f"not a port: {entry!r}")
    return _Peer(network, number)
