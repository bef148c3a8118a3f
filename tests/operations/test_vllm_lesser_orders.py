"""Adapters, versions, aborts and the end of engines that speak `vllm.Control`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.domain.commands import (
    AbortRequests,
    LoadLora,
    Pause,
    SetWeightVersion,
    Shutdown,
    UnloadLora,
)
from app.domain.engine import HealthState
from app.domain.errors import LoraExists, UnknownLora, UnsupportedOperation
from app.domain.kinds import (
    FailureEffect,
    OperationKind,
    OperationState,
    PauseMode,
    Verification,
)
from app.domain.operation import Operation
from tests.doubles.vllm_control import C
from tests.operations.gateway import until
from tests.operations.vllm import vllm_gateway

pytestmark = pytest.mark.anyio

S = OperationState


def load(name: str = "sql", path: str = "/loras/sql") -> LoadLora:
    return LoadLora(name=name, path=path)


def reason(operation: Operation) -> str:
    assert operation.error is not None
    return operation.error.reason


@pytest.mark.long
async def test_an_adapter_is_loaded_on_every_member_and_unloaded(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        loaded = await gateway.carry_out(load())
        assert loaded.state is S.SUCCEEDED
        assert loaded.result == {
            "changed": True,
            "lora": {"name": "sql", "id": 1, "path": "/loras/sql"},
        }
        facts = await gateway.facts()
        assert [lora.name for lora in facts.loras] == ["sql"]
        assert facts.revision == 2
        again = await gateway.carry_out(load())
        assert again.result is not None
        assert again.result["changed"] is False
        with pytest.raises(LoraExists):
            await gateway.give(load(path="/loras/other"))
        gone = await gateway.carry_out(UnloadLora(name="sql"))
        assert gone.result == {"changed": True, "lora": None}
        assert (await gateway.facts()).loras == ()
        with pytest.raises(UnknownLora):
            await gateway.give(UnloadLora(name="sql"))


async def test_no_adapter_is_pushed_out_without_a_word(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.carry_out(load("a", "/loras/a"))
        await gateway.carry_out(load("b", "/loras/b"))
        assert reason(await gateway.carry_out(load("c", "/loras/c"))) == "LORA_SLOTS_FULL"
        assert gateway.engine.evicted == set()
        # Past the gateway it was: what can't be unloaded is not called unloaded.
        gateway.engine.evicted = {"a"}
        ended = await gateway.carry_out(UnloadLora(name="a"))
        assert reason(ended) == "ENGINE_ERROR"
        assert [lora.name for lora in (await gateway.facts()).loras] == ["a", "b"]


@pytest.mark.long
async def test_what_vllm_says_of_an_adapter_is_passed_on(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        assert reason(await gateway.carry_out(load(path="relative"))) == "INVALID_ARGUMENT"
        taken = await gateway.carry_out(load("tiny", "/loras/a"))
        assert reason(taken) == "LORA_ALREADY_LOADED"
        assert (await gateway.facts()).revision == 1
        numbered = await gateway.carry_out(LoadLora(name="n", path="/loras/n", id=7))
        assert reason(numbered) == "UNSUPPORTED_OPERATION"


@pytest.mark.long
async def test_an_adapter_that_only_one_member_has(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        gateway.controls[0].control.fails["LoadLora"] = [(C.INTERNAL, "rank too big")]
        ended = await gateway.carry_out(load())
        assert ended.error is not None
        assert (ended.error.ranks, ended.error.effect) == ((0,), FailureEffect.APPLIED_IN_PART)
        assert (await gateway.facts()).loras == ()
        assert (await gateway.known()).observed.health is HealthState.DEGRADED


@pytest.mark.long
async def test_a_load_whose_reply_is_lost_is_seen(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.loses.add("LoadLora")
        ended = await gateway.carry_out(load())
        assert (ended.state, ended.verification) == (S.SUCCEEDED, Verification.VERIFIED)
        assert gateway.engine.orders == ["LoadLora"]


@pytest.mark.long
async def test_an_engine_without_adapters_offers_none(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.lora = False
        await gateway.controls[0].restart()
        can = (await gateway.fleet.discover("e1")).capabilities
        assert OperationKind.LOAD_LORA not in can.operations


@pytest.mark.long
async def test_another_name_for_the_weights(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        named = await gateway.carry_out(SetWeightVersion(weight_version="v7"))
        assert named.result == {"changed": True, "weight_version": "v7"}
        assert (await gateway.facts()).weights.version == "v7"
        assert (await gateway.facts()).revision == 2
        again = await gateway.carry_out(SetWeightVersion(weight_version="v7"))
        assert again.result == {"changed": False, "weight_version": "v7"}
        gateway.controls[1].control.fails["UpdateWeightVersion"] = [(C.INTERNAL, "no")]
        mixed = await gateway.carry_out(SetWeightVersion(weight_version="v8"))
        assert mixed.error is not None
        assert mixed.error.ranks == (1,)
        assert (await gateway.facts()).weights.version is None


@pytest.mark.long
async def test_requests_are_ended_by_their_ids_alone(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        gateway.engine.running = {"cmpl-a", "cmpl-b"}
        ended = await gateway.carry_out(AbortRequests(request_ids=("cmpl-a", "zz")))
        assert (ended.state, ended.verification) == (S.SUCCEEDED, Verification.UNVERIFIED)
        assert ended.result == {
            "changed": False,
            "requests": [
                {"request_id": "cmpl-a", "outcome": "unverified"},
                {"request_id": "zz", "outcome": "unverified"},
            ],
            "all": None,
        }
        assert gateway.engine.running == {"cmpl-b"}
        assert len(gateway.controls[1].control.named("Abort")) == 1
        with pytest.raises(UnsupportedOperation):
            await gateway.give(AbortRequests(all=True))


@pytest.mark.long
async def test_requests_are_ended_while_a_drain_waits_for_them(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.running = {"r"}
        drain = await gateway.give(Pause(mode=PauseMode.DRAIN))
        await until(lambda: gateway.engine.paused)
        await gateway.carry_out(AbortRequests(request_ids=("r",)))
        assert (await gateway.end_of(drain)).state is S.SUCCEEDED


@pytest.mark.long
async def test_an_abort_whose_reply_is_lost_is_not_made_again(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.loses.add("Abort")
        ended = await gateway.carry_out(AbortRequests(request_ids=("a",)))
        assert (ended.state, ended.verification) == (S.SUCCEEDED, Verification.UNVERIFIED)
        assert gateway.engine.orders == ["Abort"]


@pytest.mark.long
async def test_the_engine_ends_and_comes_back_as_another(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        ended = await gateway.carry_out(Shutdown())
        assert (ended.state, ended.result) == (S.SUCCEEDED, {"changed": True})
        assert (await gateway.known()).observed.health is HealthState.UNREACHABLE
        for one in gateway.controls:
            await one.restart()
        facts = await gateway.facts()
        assert (facts.revision, facts.pause_epoch, facts.release_epoch) == (2, 1, 1)


@pytest.mark.long
async def test_an_engine_that_the_front_end_did_not_start_is_not_ended(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.manages_engine = False
        assert reason(await gateway.carry_out(Shutdown())) == "ENGINE_NOT_MANAGED"


@pytest.mark.long
async def test_the_gateway_restarted_while_the_engine_ends(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        answer = gateway.engine.hangs["Shutdown"] = asyncio.Event()
        order = await gateway.give(Shutdown())
        await until(lambda: bool(gateway.engine.named("Shutdown")))
        await gateway.stop()
        answer.set()
        await gateway.controls[0].leave()
        await gateway.start()
        assert (await gateway.end_of(order)).state is S.SUCCEEDED


@pytest.mark.long
async def test_where_cache_events_are_to_be_had(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        sources = await gateway.fleet.kv_event_sources("e1")
        assert [(one["endpoint"], one["data_parallel_rank"]) for one in sources] == [
            ("tcp://127.0.0.1:5557", 0),
            ("tcp://127.0.0.1:5558", 1),
        ]
        gateway.engine.missing = {"GetKvEventSources"}
        with pytest.raises(UnsupportedOperation):
            await gateway.fleet.kv_event_sources("e1")
