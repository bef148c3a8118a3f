"""Clients that go on until they know: writers who repeat a call under its key, and readers who come
back with the last id they heard. What they do and see is written into the history.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx2

from tests.e2e.driving import Heard, server_sent
from tests.robustness.history import (
    Answered,
    Asked,
    Closed,
    Connected,
    Delivered,
    Looked,
    Opened,
    Recorder,
    Said,
    Saw,
    Unanswered,
)

Json = dict[str, Any]
_STATES = {"completed": "succeeded", "failed": "failed", "cancelled": "cancelled"}
_CONTROL = frozenset({"snapshot", "reset", "goodbye"})
_AGAIN = frozenset({409, 429, 503})  # refused for now, by something else that goes on
_PAUSE_S = 0.1


def end_of(document: Json) -> str | None:
    """A digest of what an operation says of its end; None while it is open."""
    if not document["done"]:
        return None
    kept = ("state", "result", "error", "verification", "revision", "ended_at", "sequence")
    text = json.dumps({name: document[name] for name in kept}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Clients:
    """`urls`: of the gateways, any of which may be asked. `principal`: whose token that is, as
    `subject/client`. `trouble`: answers that no client should ever get, as they came."""

    urls: Sequence[str]
    token: str
    principal: str
    recorder: Recorder
    chance: random.Random
    trouble: list[str] = field(default_factory=list)
    ends: dict[str, Json] = field(default_factory=dict)
    _numbers: Any = field(default_factory=count)
    _client: httpx2.AsyncClient | None = None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Clients]:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
        authorization = {"authorization": f"Bearer {self.token}"}
        async with httpx2.AsyncClient(headers=authorization, timeout=60.0, limits=limits) as client:
            self._client = client
            yield self

    @property
    def http(self) -> httpx2.AsyncClient:
        assert self._client is not None
        return self._client

    def name(self, what: str) -> str:
        """A new one, for a call, key or connection."""
        return f"{what}-{next(self._numbers)}"

    def url(self) -> str:
        return self.chance.choice(self.urls)

    # ---- ordering ----

    async def order(
        self, engine: str, verb: str, body: Json, *, kind: str, key: str | None = None
    ) -> str | None:
        """The id of the operation, once one of the gateways has taken it on. None: refused for
        good, by the state of the engine."""
        key = key or self.name("key")
        while True:
            answer = await self.try_order(engine, verb, body, kind=kind, key=key)
            if answer is not None and answer.status_code in (200, 202):
                return str(answer.json()["id"])
            if answer is not None and _is_final(answer):
                return None
            await asyncio.sleep(_PAUSE_S * self.chance.random() * 2)

    async def try_order(
        self, engine: str, verb: str, body: Json, *, kind: str, key: str
    ) -> httpx2.Response | None:
        """One call. None: no answer, and nobody knows what became of it."""
        call = self.name("call")
        self.recorder.write(
            Asked(call=call, principal=self.principal, key=key, engine=engine, kind=kind)
        )
        try:
            answer = await self.http.post(
                f"{self.url()}/v1/engines/{engine}/{verb}",
                json=body,
                headers={"idempotency-key": key},
            )
        except httpx2.TransportError as error:
            self.recorder.write(Unanswered(call=call, why=type(error).__name__))
            return None
        found = answer.json()
        if answer.status_code in (200, 202):
            said = Answered(
                call=call,
                status=answer.status_code,
                operation=found["id"],
                state=found["state"],
            )
        else:
            said = Answered(call=call, status=answer.status_code, reason=found.get("reason"))
            if answer.status_code >= 500 and answer.status_code != 503:
                self.trouble.append(answer.text)
        self.recorder.write(said)
        return answer

    async def look(self, operation: str) -> Json | None:
        """One reading of it; None: no answer."""
        call = self.name("call")
        self.recorder.write(Looked(call=call, operation=operation))
        try:
            answer = await self.http.get(f"{self.url()}/v1/operations/{operation}")
        except httpx2.TransportError:
            return None
        if answer.status_code != 200:
            if answer.status_code != 503:
                self.trouble.append(answer.text)
            return None
        found: Json = answer.json()
        self.recorder.write(
            Saw(call=call, operation=operation, state=found["state"], end=end_of(found))
        )
        return found

    async def ended(self, operation: str) -> Json:
        """The operation, once it has ended."""
        while True:
            found = await self.look(operation)
            if found is not None and found["done"]:
                self.ends[operation] = found
                return found
            await asyncio.sleep(_PAUSE_S)

    # ---- hearing ----

    async def hear(
        self,
        reader: str,
        *,
        operation: str | None = None,
        engines: Sequence[str] | None = None,
        on_event: Callable[[Delivered], None] = lambda _: None,
        cut: Callable[[], int | None] = lambda: None,
        begun: asyncio.Event | None = None,
    ) -> int:
        """Until the operation's stream is over, or this is cancelled; how many connections it took.
        `cut`: after how many events the next connection is dropped. `begun`: set once it has a
        place to come back to."""
        path = "/v1/events" if operation is None else f"/v1/operations/{operation}/events"
        params = httpx2.QueryParams([("engine", engine) for engine in engines or ()])
        last: str | None = None
        for number in count(1):
            connection = self.name("connection")
            hearing = _Hearing(self.recorder, connection, last, on_event, cut(), begun)
            self.recorder.write(
                Opened(
                    reader=reader,
                    connection=connection,
                    operation=operation,
                    engines=None if engines is None else list(engines),
                    after=None if last is None else position_of(last),
                )
            )
            over = await self._hear_once(path, params, hearing)
            last = hearing.last
            if over and operation is not None:
                return number
            await asyncio.sleep(_PAUSE_S * self.chance.random())
        raise AssertionError("unreachable")

    async def _hear_once(self, path: str, params: httpx2.QueryParams, hearing: _Hearing) -> bool:
        """Whether the gateway has ended it for good."""
        headers = {"accept": "text/event-stream"}
        if hearing.last is not None:
            headers["last-event-id"] = hearing.last
        url, how = self.url() + path, "broken"
        try:
            async with self.http.stream("GET", url, params=params, headers=headers) as answer:
                hearing.connected(answer.status_code)
                if answer.status_code not in (200, 204):
                    if answer.status_code not in _AGAIN:
                        self.trouble.append((await answer.aread()).decode())
                    return False
                how = await hearing.all_of(server_sent(answer.aiter_lines()))
        except httpx2.TransportError:
            return False
        except asyncio.CancelledError:
            how = "left"
            raise
        finally:
            self.recorder.write(Closed(connection=hearing.connection, how=how))
        return how == "ended" and not hearing.goodbye


@dataclass
class _Hearing:
    """One connection. `last`: the id that a browser would come back with."""

    recorder: Recorder
    connection: str
    last: str | None
    on_event: Callable[[Delivered], None]
    most: int | None
    begun: asyncio.Event | None
    goodbye: bool = False

    def connected(self, status: int) -> None:
        self.recorder.write(Connected(connection=self.connection, status=status))

    async def all_of(self, events: AsyncIterator[Heard]) -> str:
        """How it came to its end."""
        number = 0
        if self.most == 0:
            return "left"
        async for event in events:
            self._take(event)
            number += event.type not in _CONTROL
            if number == self.most:
                return "left"
        return "ended"

    def _take(self, event: Heard) -> None:
        if event.type in _CONTROL:
            self.goodbye = self.goodbye or event.type == "goodbye"
            self.recorder.write(_said(self.connection, event))
        else:
            told = _delivered(self.connection, event)
            self.recorder.write(told)
            self.on_event(told)
        self.last = event.id or self.last
        if self.begun is not None and self.last is not None:
            self.begun.set()


def position_of(identity: str) -> int:
    return int(identity.rpartition(".")[2])


def _said(connection: str, event: Heard) -> Said:
    found = event.data
    shown = found.get("operations") or ([found["operation"]] if "operation" in found else [])
    return Said(
        connection=connection,
        type=event.type,
        position=None if event.id is None else position_of(event.id),
        known={each["id"]: each["sequence"] for each in shown},
    )


def _delivered(connection: str, event: Heard) -> Delivered:
    found = event.data
    assert event.id is not None
    assert position_of(event.id) == found["position"]
    state = found["data"]["state"] if event.type == "settled" else _STATES.get(event.type)
    return Delivered(
        connection=connection,
        position=found["position"],
        operation=found["operation"],
        engine=found["engine"],
        sequence=found["sequence"],
        type=event.type,
        state=state,
    )


def _is_final(answer: httpx2.Response) -> bool:
    """Whether another try would say the same: an order for a state that the engine is not in."""
    if answer.status_code not in _AGAIN:
        return True
    return answer.status_code == 409 and answer.json().get("reason") not in ("ENGINE_BUSY",)
