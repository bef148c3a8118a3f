"""LoRA adapters through `Control`: orders like any other, without keys."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from app.enginekit.runtime import RuntimeFault
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import lora_pb2
from tests.doubles.engine import EngineDouble
from tests.enginekit.client import Client, refused, until
from tests.enginekit.full_engine import FullEngine
from tests.enginekit.minimal_engine import fault
from tests.enginekit.minimal_engine import until as until_set

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode


@pytest.fixture
def double(full: EngineDouble) -> EngineDouble:
    return full


def load(client: Client, name: str = "tone", path: str = "/loras/tone", lora_id: int = 0) -> Any:
    adapter = lora_pb2.LoraAdapter(lora_name=name, source_path=path, lora_id=lora_id)
    return client.control.LoadLora(lora_pb2.LoadLoraRequest(adapter=adapter), timeout=30)


def unload(client: Client, name: str = "tone") -> Any:
    return client.control.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name=name), timeout=30)


async def names(stub: Any) -> list[str]:
    told = await stub.ListLoras(lora_pb2.ListLorasRequest(), timeout=30)
    return [adapter.lora_name for adapter in told.adapters]


async def test_they_come_and_go(client: Client, engine: FullEngine) -> None:
    before = await client.profile()
    loaded = await load(client)
    assert not loaded.already_loaded
    assert (loaded.adapter.lora_id, loaded.adapter.lora_name) == (1, "tone")
    after = await client.profile()
    assert after.revision == before.revision + 1
    assert [adapter.lora_name for adapter in after.state.loras] == ["tone"]
    # Reading is allowed to those who may only generate, too.
    assert await names(client.control) == await names(client.reading) == ["tone"]
    again = await load(client)
    assert again.already_loaded
    assert again.adapter == loaded.adapter
    assert (await client.profile()).revision == after.revision
    assert len({call.operation_id for call in engine.calls}) == 1
    gone = await unload(client)
    assert gone.adapter == loaded.adapter
    assert await names(client.control) == []
    assert (await client.profile()).revision == after.revision + 1


async def test_a_name_stands_for_one_adapter(client: Client, engine: FullEngine) -> None:
    await load(client)
    seen = await refused(load(client, path="/loras/other"))
    assert (seen.code, seen.reason) == (Code.ALREADY_EXISTS, "LORA_ALREADY_LOADED")
    seen = await refused(load(client, lora_id=9))
    assert seen.code is Code.ALREADY_EXISTS
    seen = await refused(unload(client, "other"))
    assert (seen.code, seen.reason) == (Code.NOT_FOUND, "LORA_NOT_FOUND")


async def test_the_same_load_at_once_is_one_load(client: Client, engine: FullEngine) -> None:
    let_go = asyncio.Event()
    engine.script("prepare", until_set(let_go))
    first = load(client)
    await until(lambda: engine.calls)
    second, third = load(client), load(client)
    seen = await refused(load(client, name="another"))
    assert (seen.code, seen.reason) == (Code.ABORTED, "ENGINE_BUSY")
    (opened,) = (await client.profile()).state.open_operations
    assert opened.kind == pb.ADMIN_OPERATION_KIND_LOAD_LORA
    assert seen.metadata["operation_id"] == opened.operation_id
    let_go.set()
    answers = await asyncio.gather(first, second, third)
    assert [answer.adapter.lora_id for answer in answers] == [1, 1, 1]
    assert [call.phase for call in engine.calls if call.rank == 0] == ["prepare", "commit"]


async def test_a_caller_who_leaves_does_not_take_the_load_along(
    client: Client, engine: FullEngine
) -> None:
    let_go = asyncio.Event()
    engine.script("prepare", until_set(let_go))
    call = load(client)
    await until(lambda: engine.calls)
    call.cancel()
    let_go.set()

    async def loaded() -> bool:
        return await names(client.control) == ["tone"]

    await until(loaded)


async def test_a_load_that_fails_is_on_no_rank(client: Client, engine: FullEngine) -> None:
    engine.script("commit", fault, 1)
    seen = await refused(load(client))
    assert (seen.code, seen.reason) == (Code.INTERNAL, "RANK_BROKEN")
    assert (seen.metadata["ranks"], seen.metadata["effect"]) == ("1", "rolled_back")
    operation = await client.operation(operation_id=seen.metadata["operation_id"])
    assert operation.failed.reason == "RANK_BROKEN"
    assert await names(client.control) == []
    assert [engine.held[rank].loras for rank in engine.ranks] == [(), ()]


async def test_an_eviction_is_told(client: Client, engine: FullEngine) -> None:
    engine.most_loras = 1
    await load(client)
    before = await client.profile()
    await load(client, "other", "/loras/other")
    after = await client.profile()
    assert after.revision == before.revision + 1
    assert [adapter.lora_name for adapter in after.state.loras] == ["other"]
    operation_id = engine.calls[-1].operation_id
    operation = await client.operation(operation_id=operation_id)
    assert operation.completed.changed
    assert [warning.reason for warning in operation.warnings] == ["LORA_EVICTED"]
    assert "tone" in operation.warnings[0].message


async def test_a_fault_may_say_its_code(client: Client, engine: FullEngine) -> None:
    async def in_use(_order: object, _rank: int) -> None:
        text = "2 requests use the adapter"
        raise RuntimeFault("LORA_IN_USE", text, retryable=True, code="FAILED_PRECONDITION")

    await load(client)
    engine.script("prepare", in_use)
    seen = await refused(unload(client))
    assert (seen.code, seen.reason) == (Code.FAILED_PRECONDITION, "LORA_IN_USE")
    assert seen.metadata["retryable"] == "true"
    assert await names(client.control) == ["tone"]


async def test_a_finished_load_can_be_looked_up(client: Client, engine: FullEngine) -> None:
    await load(client)
    (operation_id,) = {call.operation_id for call in engine.calls}
    operation = await client.operation(operation_id=operation_id)
    assert operation.kind == pb.ADMIN_OPERATION_KIND_LOAD_LORA
    assert operation.completed.changed
    assert operation.completed.WhichOneof("result") is None


async def test_what_is_malformed(client: Client, engine: FullEngine) -> None:
    for call in (load(client, name=""), load(client, path=""), unload(client, "")):
        assert (await refused(call)).code is Code.INVALID_ARGUMENT
    newer = lora_pb2.UnloadLoraRequest.FromString(b"\xfa\x06\x01x")
    call = client.control.UnloadLora(newer, timeout=30)
    assert (await refused(call)).code is Code.INVALID_ARGUMENT
    for mutation in (
        client.reading.LoadLora(lora_pb2.LoadLoraRequest(), timeout=30),
        client.reading.UnloadLora(lora_pb2.UnloadLoraRequest(), timeout=30),
    ):
        assert (await refused(mutation)).reason == "ADMIN_LISTENER_ONLY"
    assert engine.calls == []
