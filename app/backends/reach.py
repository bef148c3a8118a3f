"""Where the gateway may connect to: addresses as values, and the allow-list they are held to.

Pure: a name is resolved elsewhere, and what it resolves to is brought here again. Without that
second look whoever controls the name could point an allowed one at any host.
"""

from __future__ import annotations

import ipaddress
import os.path
import re
from dataclasses import dataclass

from app.domain.errors import InvalidArgument

_NAME = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*"
)

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class OutOfReach(InvalidArgument):
    reason = "ADDRESS_NOT_ALLOWED"


@dataclass(frozen=True, slots=True)
class Address:
    """Either a host (name or IP literal) with a port, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    socket: str = ""

    @property
    def ip(self) -> IpAddress | None:
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None


def parse_address(text: str) -> Address:
    """`host:port`, `[v6]:port` or `unix:/absolute/path`. Raises InvalidArgument."""
    malformed = InvalidArgument("an address is host:port or unix:/absolute/path")
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/") or "\x00" in path or os.path.normpath(path) != path:
            raise malformed
        return Address(socket=path)
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise malformed
    if "%" in host:
        raise malformed  # a zone: it names an interface of this machine, not a place
    if host.startswith("[") and host.endswith("]"):
        try:
            return Address(host=str(ipaddress.IPv6Address(host[1:-1])), port=int(port))
        except ValueError:
            raise malformed from None
    try:
        return Address(host=str(ipaddress.IPv4Address(host)), port=int(port))
    except ValueError:
        name = host.lower()
        # All digits and dots but no IPv4 address: resolvers read such names in surprising ways.
        if not _NAME.fullmatch(name) or name.rpartition(".")[2].isdigit():
            raise malformed from None
        return Address(host=name, port=int(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachPolicy:
    """`hosts`: names (`*.example` for anything below it) and IP literals. `cidrs`: networks.
    `socket_dirs`: folders whose sockets may be used. Empty everywhere: nothing can be reached.

    What a name resolves to must lie in `cidrs` when any are given. With none given a listed name
    is trusted to be what its resolver says, save for addresses that no engine can have.
    """

    hosts: tuple[str, ...] = ()
    cidrs: tuple[str, ...] = ()
    socket_dirs: tuple[str, ...] = ()
    allow_plaintext_beyond_loopback: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a network or folder that is none."""
        for cidr in self.cidrs:
            ipaddress.ip_network(cidr)
        for folder in self.socket_dirs:
            if not os.path.isabs(folder):
                raise ValueError(f"socket folder must be an absolute path: {folder}")

    def check(self, address: str, *, encrypted: bool = False) -> Address:
        """Judge an address as it is written. Raises InvalidArgument, OutOfReach."""
        parsed = parse_address(address)
        if parsed.socket:
            self.check_socket(parsed.socket)
        elif parsed.ip is not None:
            self.check_ip(parsed, parsed.ip, encrypted=encrypted)
        elif not names_host(self.hosts, parsed.host):
            raise OutOfReach("this address is not on the list of engine addresses")
        elif not encrypted and parsed.host != "localhost":
            # The name may turn out to be loopback; only the resolved address shows it.
            self._check_plaintext(None)
        return parsed

    def check_ip(self, address: Address, ip: IpAddress, *, encrypted: bool) -> None:
        """Judge an IP address that `address` is, or resolved to. Raises OutOfReach."""
        plain = _unmapped(ip)
        if plain.is_multicast or plain.is_unspecified or plain.is_link_local:
            raise OutOfReach("this address can't be an engine's")
        literal = address.ip is not None
        listed = literal and address.host in self.hosts
        within = any(
            plain.version == network.version and plain in network
            for network in map(ipaddress.ip_network, self.cidrs)
        )
        if not listed and not within and (literal or self.cidrs):
            raise OutOfReach("this address is not on the list of engine addresses")
        if not encrypted:
            self._check_plaintext(plain)

    def check_socket(self, path: str) -> None:
        """The socket, links resolved, must lie inside one of the folders. Raises OutOfReach."""
        real = os.path.realpath(path)
        for folder in self.socket_dirs:
            base = os.path.realpath(folder)
            if real != base and os.path.commonpath((real, base)) == base:
                return
        raise OutOfReach("this socket is not in a folder for engine sockets")

    def _check_plaintext(self, ip: IpAddress | None) -> None:
        if self.allow_plaintext_beyond_loopback or (ip is not None and ip.is_loopback):
            return
        raise OutOfReach("an engine beyond loopback must be reached through TLS")


def names_host(allowed: tuple[str, ...], host: str) -> bool:
    """Whether the list has the host, literally or by `*.` and what it ends with."""
    return any(
        host.endswith(name[1:].lower()) if name.startswith("*.") else host == name.lower()
        for name in allowed
    )


def _unmapped(ip: IpAddress) -> IpAddress:
    """The IPv4 address inside an IPv4-mapped IPv6 one: the kernel connects to the former."""
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    return ip
