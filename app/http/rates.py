"""How often something may happen, by the generic cell rate algorithm. Pure: times come in.

For each key one number is kept, the moment at which everything that happened would be used up at
the rate. What happens adds to it; more than `burst` ahead of now is too much. In any span of t
seconds there can so be no more than `burst + t * per_s`.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

_SITE = 48


@dataclass(frozen=True, slots=True)
class Rate:
    """`burst`: how many at once, at least 1, of a key that was quiet."""

    per_s: float
    burst: int

    @property
    def _each_s(self) -> float:
        return 1.0 / self.per_s

    def wait_s(self, used_up_at: float, now: float) -> float:
        """0: it may happen now."""
        ahead = max(used_up_at - now, 0.0)
        return max(0.0, ahead - (self.burst - 1) * self._each_s)

    def used(self, used_up_at: float, now: float) -> float:
        return max(used_up_at, now) + self._each_s


class Meter:
    """One rate for many keys, of which `most` are told apart. The one that was quiet for longest is
    forgotten first: whoever comes under ever new keys gains a burst for each, and no memory.

    `rate` None: nothing is too much. Not for use from several threads.
    """

    def __init__(self, rate: Rate | None, *, most: int = 10_000) -> None:
        self._rate = rate
        self._most = most
        self._used_up_at: OrderedDict[Hashable, float] = OrderedDict()

    def wait_s(self, key: Hashable, now: float) -> float:
        """How long until it may happen; 0: now. Changes nothing."""
        if self._rate is None:
            return 0.0
        return self._rate.wait_s(self._used_up_at.get(key, now), now)

    def take(self, key: Hashable, now: float) -> float:
        """The same; if it may happen now, it has."""
        if self._rate is None:
            return 0.0
        before = self._used_up_at.get(key, now)
        wait_s = self._rate.wait_s(before, now)
        if not wait_s:
            self._used_up_at[key] = self._rate.used(before, now)
        if key in self._used_up_at:
            self._used_up_at.move_to_end(key)
        while len(self._used_up_at) > self._most:
            self._used_up_at.popitem(last=False)
        return wait_s

    def __len__(self) -> int:
        return len(self._used_up_at)


def neighbourhood(address: str) -> str:
    """What counts as one caller's address: without the port that some proxies add; of IPv6 the /48
    that a site is given, within which it has 65,536 networks, and in each a host picks its own."""
    try:
        parsed = ipaddress.ip_address(_without_port(address).partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, _SITE), strict=False))
    return str(parsed)


def _without_port(address: str) -> str:
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address
