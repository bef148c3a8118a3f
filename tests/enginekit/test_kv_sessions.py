"""Sessions of KV in the kit: who may end one, and a prefill that is over when it is ready."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.domain.kinds import AbortOutcome
from app.enginekit.runtime import Feature, Load
from app.rpc.openengine.v1 import generation_pb2, kv_pb2, lifecycle_pb2, server_pb2
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client, refused, until
from tests.enginekit.full_engine import FullEngine

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode
_SECRET = "open sesame"


class PrefillEngine(FullEngine):
    """Holds one session for each request, and knows its holder by a secret."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.features = frozenset({Feature.KV_SESSION})
        self.sessions: dict[str, AbortOutcome] = {}
        self.messages: list[str] = []

    def kv_connector(self) -> kv_pb2.KvConnectorInfo:
        return kv_pb2.KvConnectorInfo(enabled=True, transfer_backend="none")

    async def abort_kv_session(
        self, session: kv_pb2.KvSessionRef, message: str, *, by_admin: bool
    ) -> AbortOutcome:
        self.messages.append(message)
        if not by_admin and session.transfer_backend != _SECRET:
            return AbortOutcome.NOT_FOUND
        found = self.sessions.get(session.session_id, AbortOutcome.NOT_FOUND)
        if found is AbortOutcome.ABORTED:
            self.sessions[session.session_id] = AbortOutcome.ALREADY_FINISHED
        return found

    async def load(self) -> Load:
        return replace(await super().load(), active_kv_sessions=len(self.sessions))

    async def generate(
        self, request: generation_pb2.GenerateRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for response in super().generate(request):
            if response.WhichOneof("event") != "finished":
                continue
            self.sessions[request.request_id] = AbortOutcome.ABORTED
            session = kv_pb2.KvSessionRef(session_id=request.request_id)
            ready = generation_pb2.PrefillReady(kv_session=session)
            yield generation_pb2.GenerateResponse(
                request_id=request.request_id, prefill_ready=ready
            )


@pytest.fixture
async def double(tmp_path: Path) -> AsyncIterator[EngineDouble]:
    async with running_engine(tmp_path, make_engine=lambda: PrefillEngine(world_size=1)) as running:
        yield running


@pytest.fixture
def prefill(double: EngineDouble) -> PrefillEngine:
    assert isinstance(double.engine, PrefillEngine)
    return double.engine


async def prefilled(client: Client) -> str:
    request = generation_pb2.GenerateRequest(prompt="one two three")
    (ready,) = [one async for one in client.inference.Generate(request, timeout=30)]
    return str(ready.prefill_ready.kv_session.session_id)


def ending(stub: Any, session: str, backend: str = "") -> Any:
    reference = kv_pb2.KvSessionRef(session_id=session, transfer_backend=backend)
    return stub.Abort(lifecycle_pb2.AbortRequest(kv_session=reference), timeout=30)


async def test_a_session_is_ended_by_its_name_or_by_who_holds_it(
    client: Client, prefill: PrefillEngine
) -> None:
    for stub, backend in ((client.control, ""), (client.reading, _SECRET)):
        session = await prefilled(client)
        first = await ending(stub, session, backend)
        assert first.status == lifecycle_pb2.ABORT_STATUS_ABORTED
        again = await ending(stub, session, backend)
        assert again.status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
    assert prefill.messages[0] == "aborted by an administrator"
    assert prefill.messages[-1] == "aborted by the caller"


async def test_what_is_refused(client: Client, prefill: PrefillEngine) -> None:
    session = await prefilled(client)
    seen = await refused(ending(client.reading, session))
    assert (seen.code, seen.reason) == (Code.NOT_FOUND, "KV_SESSION_NOT_FOUND")
    seen = await refused(ending(client.control, "another"))
    assert (seen.code, seen.reason) == (Code.NOT_FOUND, "KV_SESSION_NOT_FOUND")
    seen = await refused(ending(client.control, ""))
    assert (seen.code, seen.fields) == (Code.INVALID_ARGUMENT, ("kv_session.session_id",))
    prefill.sessions[session] = AbortOutcome.FAILED
    seen = await refused(ending(client.control, session))
    assert seen.code is Code.INTERNAL


async def test_a_prefill_is_over_when_it_is_ready(client: Client, prefill: PrefillEngine) -> None:
    """A drain counts it among those that it let finish."""
    prefill.stall()
    reading = client.inference.Generate(
        generation_pb2.GenerateRequest(prompt="one two three"), timeout=30
    )
    await until(lambda: prefill.running == 1)
    pausing = await client.begin(client.pause("drain"))
    await pausing.next()
    assert await client.admission() == "draining"
    prefill.go()
    assert [one.WhichOneof("event") async for one in reading] == ["prefill_ready"]
    events = await pausing.rest()
    assert events[-1].completed.pause.requests_finished == 1


async def test_what_is_told(client: Client) -> None:
    await prefilled(client)
    info = await client.reading.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=30)
    assert info.kv_connector.enabled
    assert info.kv_connector.transfer_backend == "none"
    assert (await client.load()).active_kv_sessions == 1
