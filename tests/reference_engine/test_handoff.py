"""Prefill in one engine, decode in another: served engines, over gRPC and TCP."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.domain.kinds import EngineRole
from app.reference_engine.serving import EngineSettings, ServedEngine, served
from app.reference_engine.tiny_model import ensure_tiny_checkpoint
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import kv_pb2, lifecycle_pb2, server_pb2
from tests.reference_engine.calling import Call, Clients, clients_of, key
from tests.reference_engine.handing_over import WORDS, continued, prefilled, request, settings
from tests.reference_engine.serving import PATIENCE_S, eventually

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode
ABORTED = lifecycle_pb2.ABORT_STATUS_ABORTED
# Keys and values of 75 tokens in the tiny model: 2 layers of 2 heads of 32 floats.
SESSION_BYTES = 2 * 75 * 2 * 2 * 32 * 4
FINISHED_ALREADY = lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED


@dataclass
class Three:
    """One that does both, and two that do a part each. All with the same weights."""

    whole: Clients
    prefill: Clients
    decode: Clients


@pytest.fixture(scope="module")
async def engines(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[list[ServedEngine]]:
    roles = (EngineRole.AGGREGATED, EngineRole.PREFILL, EngineRole.DECODE)
    async with AsyncExitStack() as stack:
        wanted = [settings(tiny, tmp_path_factory.mktemp(role), role) for role in roles]
        yield await started(stack, wanted)


async def started(stack: AsyncExitStack, wanted: list[EngineSettings]) -> list[ServedEngine]:
    """All at once: most of a start is waiting."""
    engines = [served(one) for one in wanted]
    found = await asyncio.gather(*(engine.__aenter__() for engine in engines))
    for engine in engines:
        stack.push_async_exit(engine)
    return list(found)


@pytest.fixture
async def three(engines: list[ServedEngine]) -> AsyncIterator[Three]:
    async with AsyncExitStack() as stack:
        yield Three(*[await stack.enter_async_context(clients_of(one)) for one in engines])


async def abort_session(stub: Any, session: kv_pb2.KvSessionRef) -> Any:
    request = lifecycle_pb2.AbortRequest(kv_session=session)
    return (await stub.Abort(request, timeout=PATIENCE_S)).status


def open_parts() -> int:
    """Files of KV that the front ends, which are in this process, have open."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:kv")
    return found


async def held(clients: Clients) -> int:
    return (await clients.load()).active_kv_sessions


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 16, 75])
async def test_two_engines_say_what_one_says(temperature: float, length: int, three: Three) -> None:
    options: dict[str, Any] = {"words": WORDS[:length], "temperature": temperature}
    expected = await continued(three.whole, None, **options)
    assert expected.tokens == 24
    before = await held(three.prefill)
    files = open_parts()
    session = await prefilled(three.prefill, **options)
    assert open_parts() == files + 1
    heard = await continued(three.decode, session, **options)
    assert (heard.ids, heard.text) == (expected.ids, expected.text)
    assert heard.cached == length - 1
    assert await held(three.prefill) == before
    assert open_parts() == files, "nothing is left of it in memory"


async def test_each_engine_does_its_own_part_alone(three: Three) -> None:
    session = await prefilled(three.prefill)
    for clients, given in ((three.whole, session), (three.prefill, session), (three.decode, None)):
        heard = await continued(clients, given)
        assert (heard.status, heard.reason) == (Code.FAILED_PRECONDITION, "ROLE_MISMATCH")
    # None of that has cost the session.
    assert (await continued(three.decode, session)).tokens == 24


async def test_a_session_is_fetched_once_and_by_who_has_its_secret(three: Three) -> None:
    session = await prefilled(three.prefill)
    forged = kv_pb2.KvSessionRef()
    forged.CopyFrom(session)
    forged.attributes_struct["secret"] = "00" * 32
    refused = (Code.NOT_FOUND, "KV_SESSION_NOT_FOUND")
    heard = await continued(three.decode, forged)
    assert (heard.status, heard.reason) == refused
    assert (await continued(three.decode, session)).tokens == 24
    heard = await continued(three.decode, session)
    assert (heard.status, heard.reason) == refused


async def test_a_session_is_of_one_prompt(three: Three) -> None:
    session = await prefilled(three.prefill)
    for words in (WORDS[:-1], (*WORDS[:-1], 5)):
        heard = await continued(three.decode, session, words=words)
        assert (heard.status, heard.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
        assert "another prompt" in heard.detail
    assert (await continued(three.decode, session)).tokens == 24


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session_id", ""),
        ("transfer_backend", "nixl"),
        ("dp_rank", 1),
        ("host", "192.0.2.1"),
        ("port", 0),
        ("protocol", "ucx"),
        ("secret", "not hex"),
    ],
)
async def test_what_names_no_session_of_an_allowed_peer_is_refused(
    field: str, value: Any, three: Three
) -> None:
    session = await prefilled(three.prefill)
    if field == "secret":
        session.attributes_struct["secret"] = value
    else:
        part: Any = session if hasattr(session, field) else session.endpoints[0]
        setattr(part, field, value)
    heard = await continued(three.decode, session)
    assert (heard.status, heard.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert "kv.session" in heard.detail


async def test_kv_of_other_weights_is_never_decoded(three: Three, tiny: Path) -> None:
    other = await asyncio.to_thread(ensure_tiny_checkpoint, tiny.parent.parent / "others", 1)
    session = await prefilled(three.prefill)
    await three.decode.update("v2", disk=pb.DiskWeights(path=str(other))).completed()
    heard = await continued(three.decode, session)
    assert (heard.status, heard.reason) == (Code.UNAVAILABLE, "KV_TRANSFER_FAILED")
    assert "other weights (versions there and here: unnamed, v2)" in heard.detail
    await three.decode.update("v1", disk=pb.DiskWeights(path=str(tiny))).completed()
    assert (await continued(three.decode, session)).tokens == 24


async def test_a_session_is_ended_by_its_holder_or_an_administrator(three: Three) -> None:
    for stub in (three.prefill.control, three.prefill.reading):
        before = await held(three.prefill)
        session = await prefilled(three.prefill)
        assert await held(three.prefill) == before + 1
        assert await abort_session(stub, session) == ABORTED
        assert await held(three.prefill) == before
        assert await abort_session(stub, session) == FINISHED_ALREADY
        heard = await continued(three.decode, session)
        assert heard.reason == "KV_SESSION_NOT_FOUND"
    session = await prefilled(three.prefill)
    named = kv_pb2.KvSessionRef(session_id=session.session_id)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await abort_session(three.prefill.reading, named)
    assert refused.value.code() is Code.NOT_FOUND
    # For an administrator its name is enough.
    assert await abort_session(three.prefill.control, named) == ABORTED
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await abort_session(three.prefill.control, kv_pb2.KvSessionRef(session_id="unheard-of"))
    assert refused.value.code() is Code.NOT_FOUND


async def test_who_goes_on_from_a_session_is_ended_with_it(three: Three) -> None:
    session = await prefilled(three.prefill)
    call = await three.decode.send(request(session, max_tokens=4000)).after(3)
    assert await abort_session(three.decode.control, session) == ABORTED
    heard = await call.whole()
    assert heard.finished is not None
    assert heard.finished.message == "aborted by an administrator"


async def test_what_the_engines_say_of_themselves(three: Three) -> None:
    for clients, role in (
        (three.whole, server_pb2.ENGINE_ROLE_AGGREGATED),
        (three.prefill, server_pb2.ENGINE_ROLE_PREFILL),
        (three.decode, server_pb2.ENGINE_ROLE_DECODE),
    ):
        info = await clients.control.GetServerInfo(
            server_pb2.GetServerInfoRequest(), timeout=PATIENCE_S
        )
        profile = await clients.profile()
        assert (info.engine_role, profile.state.role) == (role, role)
        assert info.kv_connector.supports_decode_pull
        listens = bool(info.kv_connector.local_endpoints)
        assert listens is (role == server_pb2.ENGINE_ROLE_PREFILL)


def reconfigure(
    clients: Clients,
    role: server_pb2.EngineRole.ValueType,
    drain: pb.DrainRule.ValueType = pb.DRAIN_RULE_WAIT,
) -> Any:
    request = pb.ReconfigureServingRequest(idempotency_key=key(), role=role, drain=drain)
    return clients.told(clients.admin.ReconfigureServing(request, timeout=PATIENCE_S))


async def test_a_role_is_changed_by_an_order(three: Three) -> None:
    expected = await continued(three.whole, None)
    to_decode, to_whole = server_pb2.ENGINE_ROLE_DECODE, server_pb2.ENGINE_ROLE_AGGREGATED
    # A request in flight keeps its engine's old role until it is done.
    running = await three.whole.send(request(max_tokens=200)).after(1)
    told = reconfigure(three.whole, to_decode)
    session = await prefilled(three.prefill)
    completed = await told.completed()
    heard = await running.whole()
    assert heard.finished is not None
    assert heard.tokens == 200
    assert completed.reconfigure_serving.role == to_decode
    assert completed.verification == pb.VERIFICATION_VERIFIED
    assert (await three.whole.profile()).state.role == to_decode
    assert (await continued(three.whole, session)).ids == expected.ids
    assert (await continued(three.whole, None)).reason == "ROLE_MISMATCH"
    await reconfigure(three.whole, server_pb2.ENGINE_ROLE_PREFILL).completed()
    session = await prefilled(three.whole)
    assert (await continued(three.decode, session)).ids == expected.ids
    await reconfigure(three.whole, to_whole).completed()
    assert (await continued(three.whole, None)).ids == expected.ids


async def test_a_role_that_cannot_be_had_leaves_the_old_one(tiny: Path, tmp_path: Path) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    one = settings(
        tiny,
        tmp_path,
        EngineRole.AGGREGATED,
        address=f"127.0.0.1:{port}",
        max_held_bytes=SESSION_BYTES * 3 // 2,
    )
    async with served(one) as engine, clients_of(engine) as clients:
        end = await reconfigure(clients, server_pb2.ENGINE_ROLE_PREFILL).end()
        assert end.failed.reason == "KV_ADDRESS_UNAVAILABLE"
        profile = await clients.profile()
        assert profile.state.role == server_pb2.ENGINE_ROLE_AGGREGATED
        assert profile.state.admission == pb.ADMISSION_STATE_OPEN
        assert (await continued(clients, None)).tokens == 24
        # What runs is ended where the order says so.
        taken.close()
        await taken.wait_closed()
        running = await clients.send(request(max_tokens=4000)).after(1)
        told = reconfigure(clients, server_pb2.ENGINE_ROLE_PREFILL, pb.DRAIN_RULE_ABORT)
        await told.completed()
        assert (await running.whole()).finished is not None
        # Of sessions there are so many as there is room for.
        session = await prefilled(clients)
        heard = await clients.send(request()).whole()
        assert (heard.status, heard.reason) == (Code.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert await abort_session(clients.control, session) == ABORTED
        await prefilled(clients)


@asynccontextmanager
async def waiting(three: Three) -> AsyncIterator[Call]:
    """A request whose KV does not come: the other side says nothing."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def waits() -> bool:
        return (await three.decode.load()).queued_requests == 1

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        session = await prefilled(three.prefill)
        session.endpoints[0].port = silent.sockets[0].getsockname()[1]
        call = three.decode.send(request(session))
        await eventually(waits)
        yield call


async def test_a_drain_waits_for_what_still_fetches(three: Three) -> None:
    """And an abort reaches it: the request is the engine's from the start."""
    async with waiting(three) as call:
        pausing = three.decode.pause(pb.PAUSE_MODE_DRAIN)
        await pausing.until("progress")
        assert not call.over
        assert (await three.decode.abort(None)).status == ABORTED
        heard = await call.whole()
        assert heard.finished is not None
        assert (await pausing.completed()).pause.requests_aborted == 0
        await three.decode.resume()


async def test_over_two_ranks_each(tiny: Path, tmp_path: Path, three: Three) -> None:
    """And engines of different sizes do not understand each other."""
    async with AsyncExitStack() as stack:
        roles = (EngineRole.PREFILL, EngineRole.DECODE)
        wanted = [settings(tiny, tmp_path / role, role, ranks=2) for role in roles]
        engines = await started(stack, wanted)
        prefill, decode = [await stack.enter_async_context(clients_of(one)) for one in engines]
        for temperature in (0.0, 1.0):
            session = await prefilled(prefill, temperature=temperature)
            heard = await continued(decode, session, temperature=temperature)
            told = reconfigure(decode, server_pb2.ENGINE_ROLE_AGGREGATED)
            await told.completed()
            expected = await continued(decode, None, temperature=temperature)
            await reconfigure(decode, server_pb2.ENGINE_ROLE_DECODE).completed()
            assert heard.ids == expected.ids
            assert heard.cached == len(WORDS) - 1
        heard = await continued(three.decode, await prefilled(prefill))
        assert (heard.status, heard.reason) == (Code.UNAVAILABLE, "KV_TRANSFER_FAILED")
        assert "2 ranks" in heard.detail


async def test_sessions_outlive_the_ranks_and_requests_do_not(
    three: Three, engines: list[ServedEngine]
) -> None:
    expected = await continued(three.whole, None)
    session = await prefilled(three.prefill)
    os.kill(engines[1].rank_pids[0], signal.SIGKILL)
    assert (await continued(three.decode, session)).ids == expected.ids

    async def back() -> bool:
        # The profile says nothing of a loss that nobody has noticed yet.
        heard = await three.prefill.send(request()).whole()
        return heard.session is not None

    await eventually(back)
    async with waiting(three) as call:
        os.kill(engines[2].rank_pids[0], signal.SIGKILL)
        heard = await call.whole()
        assert heard.error is not None
        assert heard.error.retryable
