"""A reader of server-sent events that goes by the letter of the standard."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.http.gateway import Gateway


@dataclass(frozen=True)
class Heard:
    type: str
    id: str | None
    data: dict[str, Any]


@dataclass
class Reader:
    """`last_id`: what an EventSource would send when it comes back."""

    answer: httpx2.Response
    last_id: str | None = None
    comments: list[str] = field(default_factory=list)
    retry: list[int] = field(default_factory=list)

    async def __aiter__(self) -> AsyncIterator[Heard]:
        event, identity, data = "message", None, list[str]()
        async for line in self.answer.aiter_lines():
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if line == "":
                if data:
                    self.last_id = identity or self.last_id
                    yield Heard(event, identity, json.loads("\n".join(data)))
                event, identity, data = "message", None, []
            elif name == "":
                self.comments.append(value)
            elif name == "event":
                event = value
            elif name == "id":
                identity = value
            elif name == "data":
                data.append(value)
            elif name == "retry":
                self.retry.append(int(value))


@asynccontextmanager
async def watching(
    gate: Gateway,
    path: str,
    last_id: str | None = None,
    *,
    headers: dict[str, str] | None = None,
    timeout_s: float = 30.0,
) -> AsyncIterator[Reader]:
    sent = {**gate.auth(), "Accept": "text/event-stream", **(headers or {})}
    if last_id is not None:
        sent["Last-Event-ID"] = last_id
    async with gate.http.stream("GET", path, headers=sent, timeout=timeout_s) as answer:
        yield Reader(answer)


async def heard(gate: Gateway, path: str, last_id: str | None = None) -> list[Heard]:
    """All of a stream that ends by itself."""
    async with watching(gate, path, last_id) as reader:
        assert reader.answer.status_code == 200, await reader.answer.aread()
        return [event async for event in reader]


async def first(gate: Gateway, path: str, count: int, last_id: str | None = None) -> list[Heard]:
    """So many events, then the connection is dropped."""
    found: list[Heard] = []
    async with watching(gate, path, last_id) as reader:
        assert reader.answer.status_code == 200, await reader.answer.aread()
        async for event in reader:
            found.append(event)
            if len(found) == count:
                break
    return found


async def in_ledger(data_dir: Path, *statements: str) -> None:
    """Behind the back of the gateway, but not on its loop: the gateway has to go on, or a
    transaction that it is in keeps the file locked for as long as these statements wait."""

    def execute() -> None:
        with closing(sqlite3.connect(data_dir / "chadburn.db", timeout=60)) as database, database:
            for statement in statements:
                database.execute(statement)

    await asyncio.to_thread(execute)
