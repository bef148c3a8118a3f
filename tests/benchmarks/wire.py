"""A client that costs little: one request as bytes, sent again and again over open connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from urllib.parse import urlsplit


async def requests_per_second(
    url: str, headers: Sequence[str], *, connections: int, seconds: float
) -> float:
    """GET, one at a time per connection. Raises AssertionError for any answer but 200."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    lines = [f"GET {parts.path} HTTP/1.1", f"Host: {parts.netloc}", *headers, "", ""]
    request = "\r\n".join(lines).encode()
    ends_at = time.monotonic() + seconds

    async def ask() -> int:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        count = 0
        try:
            while time.monotonic() < ends_at:
                writer.write(request)
                await _answer(reader)
                count += 1
        finally:
            writer.close()
        return count

    begun = time.monotonic()
    counts = await asyncio.gather(*(ask() for _ in range(connections)))
    return sum(counts) / (time.monotonic() - begun)


async def _answer(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head.decode()
    length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
    await reader.readexactly(int(length))
