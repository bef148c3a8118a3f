"""Driving a gateway and its engine from outside: HTTP, event streams, generations, admin RPCs."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx2

from app.inference_client import Finished, Generation, InferenceClient, Piece
from app.rpc.openengine.v1 import admin_pb2, admin_pb2_grpc
from tests.e2e.processes import POLL_S

WAIT_S = 120.0
Json = dict[str, Any]


@dataclass(frozen=True)
class Heard:
    """One server-sent event as it came."""

    id: str | None
    type: str
    data: Any


async def server_sent(lines: AsyncIterator[str]) -> AsyncIterator[Heard]:
    fields: dict[str, str] = {}
    async for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
            continue
        if "data" in fields:
            data = json.loads(fields["data"])
            yield Heard(fields.get("id"), fields.get("event", "message"), data)
        fields = {}


@dataclass
class Gateway:
    """Calls as one principal."""

    url: str
    token: str
    client: httpx2.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx2.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {self.token}"},
            timeout=60.0,
            limits=httpx2.Limits(max_connections=100),
        )

    async def order(
        self, engine: str, verb: str, body: Json, *, key: str | None = None, **headers: str
    ) -> httpx2.Response:
        given = {"idempotency-key": key or str(uuid.uuid4()), **headers}
        return await self.client.post(f"/v1/engines/{engine}/{verb}", json=body, headers=given)

    async def accepted(self, engine: str, verb: str, body: Json, **more: Any) -> Json:
        """The operation of an order that must be taken."""
        answer = await self.order(engine, verb, body, **more)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    async def get(self, path: str) -> Json:
        answer = await self.client.get(path)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def ended(self, operation_id: str) -> Json:
        return await self.until(f"/v1/operations/{operation_id}", lambda found: found["done"])

    async def until(
        self, path: str, good: Callable[[Json], bool], within_s: float = WAIT_S
    ) -> Json:
        """What stands there once it is good."""
        until = time.monotonic() + within_s
        while not good(found := await self.get(path)):
            assert time.monotonic() < until, found
            await asyncio.sleep(POLL_S)
        return found

    async def does(self, engine: str, verb: str, body: Json) -> Json:
        """An order and its end, which must be a success."""
        ended = await self.ended((await self.accepted(engine, verb, body))["id"])
        assert ended["state"] == "succeeded", ended
        return ended

    async def events(self, operation_id: str) -> list[Json]:
        """All of them, as JSON pages say."""
        path = f"/v1/operations/{operation_id}/events"
        answer = await self.client.get(path, headers={"accept": "application/json"})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert not found.get("next_page_token")
        return list(found["items"])

    @asynccontextmanager
    async def stream(self, path: str, after: str | None = None) -> AsyncIterator[httpx2.Response]:
        headers = {"accept": "text/event-stream"}
        if after is not None:
            headers["last-event-id"] = after
        async with self.client.stream("GET", path, headers=headers) as response:
            yield response

    async def hear(self, operation_id: str, *, after: str | None = None) -> list[Heard]:
        """An operation's stream to its end; [] when there is nothing to come any more."""
        async with self.stream(f"/v1/operations/{operation_id}/events", after) as response:
            if response.status_code == 204:
                return []
            assert response.status_code == 200
            return [heard async for heard in server_sent(response.aiter_lines())]

    async def open_again(self, engine: str) -> None:
        """Lift whatever pause is in force: every test begins with an engine that serves."""
        found = await self.until(
            f"/v1/engines/{engine}",
            lambda e: e["running_operation"] is None and e["facts"] is not None,
        )
        if found["facts"]["pause"] is not None:
            epoch = found["facts"]["pause"]["epoch"]
            await self.does(engine, "resume", {"pause_epoch": epoch})
        await self.until(f"/v1/engines/{engine}", lambda e: e["health"]["state"] == "serving")


@dataclass
class Talk:
    """A generation that runs beside the test."""

    pieces: list[str] = field(default_factory=list)
    finished: Finished | None = None
    error: BaseException | None = None
    task: asyncio.Task[None] | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self.error is not None

    async def begun(self, pieces: int = 1) -> Talk:
        """Once so many pieces have come."""
        until = time.monotonic() + WAIT_S
        while len(self.pieces) < pieces:
            assert self.error is None, self.error
            assert self.finished is None, "it was over too soon"
            assert time.monotonic() < until, "nothing comes"
            await asyncio.sleep(0.005)
        return self

    async def over(self) -> Talk:
        assert self.task is not None
        await asyncio.wait_for(self.task, WAIT_S)
        return self


def talk(address: str, token: str, prompt: str, **wanted: Any) -> Talk:
    said = Talk()
    generation = Generation(
        request_id=wanted.pop("request_id", str(uuid.uuid4())), prompt=prompt, **wanted
    )

    async def run() -> None:
        try:
            async with InferenceClient(address, token) as client:
                async for piece in client.generate(generation, timeout_s=WAIT_S):
                    if isinstance(piece, Piece):
                        said.pieces.append(piece.text)
                    else:
                        said.finished = piece
        except Exception as error:  # told by the test that looks at it
            said.error = error

    said.task = asyncio.create_task(run())
    return said


@asynccontextmanager
async def admin(address: str, token: str) -> AsyncIterator[Admin]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield Admin(admin_pb2_grpc.OpenEngineAdminStub(channel), token)


@dataclass(frozen=True)
class Admin:
    """The engine's own word, past the gateway."""

    stub: admin_pb2_grpc.OpenEngineAdminStub
    token: str

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)

    async def profile(self) -> admin_pb2.AdminProfile:
        request = admin_pb2.GetAdminProfileRequest()
        return await self.stub.GetAdminProfile(request, metadata=self._metadata, timeout=10)

    async def operation(self, key: str) -> admin_pb2.AdminOperation:
        request = admin_pb2.GetAdminOperationRequest(idempotency_key=key)
        return await self.stub.GetOperation(request, metadata=self._metadata, timeout=10)


def sequences(events: Iterable[Json]) -> list[int]:
    return [event["sequence"] for event in events]
