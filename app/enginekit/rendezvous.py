"""Where a trainer may be met: the engine's list of hosts and ports for weights that are sent to it.

An order names the place, so without a list whoever may order an update could have the engine
connect anywhere. A name is judged by what it resolves to, and what was judged is what the engine
connects to: the name is not looked up a second time.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass


class RendezvousRefused(Exception):
    """One line, which names no address."""


_IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_NOT_ALLOWED = "the rendezvous is not on the engine's list of those that are allowed"


@dataclass(frozen=True, slots=True)
class RendezvousRule:
    """Hosts by name or network, and the ports ``first`` to ``last`` of theirs."""

    host: str | _IpNetwork
    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> RendezvousRule:
        """``HOST:PORT`` or ``HOST:FIRST-LAST``, where HOST is a name, an address, or a network
        such as 10.0.0.0/8; IPv6 in brackets. Raises ValueError."""
        host, colon, ports = text.rpartition(":")
        found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", ports)
        if not colon or not host or found is None:
            raise ValueError(f"a rendezvous is HOST:PORT or HOST:FIRST-LAST, not {text!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        if not 0 < first <= last < 65536:
            raise ValueError(f"ports are within 1 and 65535: {text!r}")
        return cls(_host(host), first, last)

    def has(self, ip: _IpAddress, port: int) -> bool:
        """Whether the rule lists the address itself; one that names a host lists none."""
        return not isinstance(self.host, str) and ip in self.host and self._has_port(port)

    def names(self, host: str, port: int) -> bool:
        return host.lower() == self.host and self._has_port(port)

    def _has_port(self, port: int) -> bool:
        return self.first <= port <= self.last


def resolved(rules: tuple[RendezvousRule, ...], host: str, port: int) -> str:
    """The address to connect to. Blocks on the resolver. Raises RendezvousRefused, with one answer
    for what is not allowed and what is not there: it is no map of the network."""
    literal = _literal(host)
    if literal is not None:
        if _possible(literal) and any(rule.has(literal, port) for rule in rules):
            return str(literal)
        raise RendezvousRefused(_NOT_ALLOWED)
    if _NAME.fullmatch(host.lower()) is None:
        raise RendezvousRefused(_NOT_ALLOWED)
    named = any(rule.names(host, port) for rule in rules)
    for ip in _addresses(host, port):
        listed = any(rule.has(ip, port) for rule in rules)
        # Who names a host trusts its resolver, though not with what no machine can have.
        if _possible(ip) and (listed or (named and not ip.is_link_local)):
            return str(ip)
    raise RendezvousRefused(_NOT_ALLOWED)


def _host(text: str) -> str | _IpNetwork:
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if inner == text and ":" in text:
        raise ValueError(f"IPv6 stands in brackets: {text!r}")
    try:
        return ipaddress.ip_network(inner)
    except ValueError:
        name = text.lower()
        if not _NAME.fullmatch(name) or name.rpartition(".")[2].isdigit():
            raise ValueError(f"neither a host's name nor an address or network: {text!r}") from None
        return name


def _literal(host: str) -> _IpAddress | None:
    try:
        return _unmapped(ipaddress.ip_address(host))
    except ValueError:
        return None


def _addresses(host: str, port: int) -> list[_IpAddress]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [
        _unmapped(ipaddress.ip_address(one[4][0])) for one in found if "%" not in str(one[4][0])
    ]


def _unmapped(ip: _IpAddress) -> _IpAddress:
    """The IPv4 address inside an IPv4-mapped IPv6 one: the kernel connects to the former."""
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    return ip


def _possible(ip: _IpAddress) -> bool:
    """Linux takes the unspecified address for this machine."""
    return not (ip.is_unspecified or ip.is_multicast) and getattr(ip, "scope_id", None) is None
