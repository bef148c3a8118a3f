"""A client that costs little: requests as bytes, one after the other over open connections."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

Make = Callable[[int], bytes]
"""The request of that number, as it is sent."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a load came to. `taken_s`: from sending each request to its whole answer."""

    lasted_s: float
    taken_s: list[float]

    @property
    def rate(self) -> float:
        return len(self.taken_s) / self.lasted_s


async def requests_per_second(
    url: str, headers: Sequence[str], *, connections: int, seconds: float
) -> float:
    """GET, one at a time per connection. Raises AssertionError for any answer but 200."""
    return (await load(url, getting(url, headers), connections=connections, seconds=seconds)).rate


async def load(
    url: str, make: Make, *, connections: int, seconds: float = 3600.0, most: int | None = None
) -> Load:
    """For so long, or until there were so many. Raises AssertionError for any answer but 2xx."""
    parts = urlsplit(url)
    ends_at = time.monotonic() + seconds
    numbers = itertools.count() if most is None else iter(range(most))
    taken: list[float] = []

    async def ask() -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            while time.monotonic() < ends_at and (number := next(numbers, None)) is not None:
                request = make(number)
                begun = time.perf_counter()
                writer.write(request)
                await _answer(reader)
                taken.append(time.perf_counter() - begun)
        finally:
            writer.close()

    begun = time.monotonic()
    await asyncio.gather(*(ask() for _ in range(connections)))
    return Load(time.monotonic() - begun, taken)


def getting(url: str, headers: Sequence[str]) -> Make:
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    lines = [f"GET {target} HTTP/1.1", f"Host: {parts.netloc}", *headers, "", ""]
    request = "\r\n".join(lines).encode()
    return lambda _number: request


async def _answer(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 2"), head.decode()
    length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
    await reader.readexactly(int(length))
