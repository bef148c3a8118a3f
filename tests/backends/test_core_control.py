"""An engine that has no admin service: what can be known and ordered of it all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

import pytest

from app.backends.port import (
    EngineBackend,
    EngineRefused,
    EngineSilent,
    OutcomeLost,
    Silence,
    StillRunning,
)
from app.domain.commands import (
    AbortRequests,
    Command,
    FlushCaches,
    LoadLora,
    Pause,
    UnloadLora,
)
from app.domain.kept_state import KeptState
from app.domain.kinds import (
    Admission,
    CacheKind,
    OperationKind,
    PauseMode,
    RevisionSource,
    Verification,
    WeightsState,
)
from app.domain.operation import JsonObject
from app.domain.transitions import Completed
from app.rpc.openengine.v1 import lora_pb2
from tests.backends.ways import backends, order, registration, told
from tests.doubles.core_engine import C, CoreEngine, H, Lost, Refuse, running_core_engine

pytestmark = pytest.mark.anyio

K = OperationKind
SQL_ADAPTER = lora_pb2.LoraAdapter(lora_name="x", lora_id=7, source_path="/x")
SQL = LoadLora(name="sql", path="/loras/sql")


class States:
    """Kept in memory, by the rules of the ledger. `taken`: by somebody else, so many times."""

    def __init__(self) -> None:
        self.rows: dict[str, KeptState] = {}
        self.taken = 0

    async def get(self, engine_id: str) -> KeptState | None:
        return self.rows.get(engine_id)

    async def put(self, engine_id: str, state: KeptState) -> bool:
        before = self.rows.get(engine_id)
        if self.taken:
            self.taken -= 1
            return False
        if state.number != (1 if before is None else before.number + 1):
            return False
        self.rows[engine_id] = state
        return True


@pytest.fixture
async def engine() -> AsyncIterator[CoreEngine]:
    async with running_core_engine() as core:
        yield core


@pytest.fixture
def states() -> States:
    return States()


@pytest.fixture
async def backend(engine: CoreEngine, states: States) -> AsyncIterator[EngineBackend]:
    known = backends(kept=states)
    try:
        yield known.of(registration(engine.address))
    finally:
        await known.close()


class TestDiscovery:
    async def test_it_says_what_there_is_and_that_there_is_no_admin_service(
        self, backend: EngineBackend
    ) -> None:
        found = await backend.discover(2.0)
        assert found.capabilities.operations == {K.ABORT_REQUESTS, K.LOAD_LORA, K.UNLOAD_LORA}
        assert not found.capabilities.cancellable
        assert found.info["engine_name"] == "tensorrt_llm"
        assert found.info["admin_service"] is False
        assert "canary" not in str(found.info)
        assert [model["model_id"] for model in found.models] == ["tiny"]
        facts = found.facts
        assert (facts.instance_id, facts.admission) == ("core-1", Admission.OPEN)
        assert (facts.revision, facts.revision_source) == (0, RevisionSource.GATEWAY)
        assert facts.weights.state is WeightsState.VALID
        assert found.capabilities.world_size == 2
        assert not found.troubles
        assert (await backend.load(2.0))["running_requests"] == 0
        assert await backend.kv_event_sources(2.0) is None

    @pytest.mark.parametrize(
        ("health", "admission", "weights", "troubles"),
        [
            (H.HEALTH_STATE_DRAINING, Admission.DRAINING, WeightsState.VALID, ()),
            (H.HEALTH_STATE_DEGRADED, Admission.OPEN, WeightsState.VALID, ("degraded",)),
            (H.HEALTH_STATE_NOT_READY, Admission.UNKNOWN, WeightsState.UNKNOWN, ("not_ready",)),
            (None, Admission.UNKNOWN, WeightsState.UNKNOWN, ()),
        ],
    )
    async def test_its_health_is_what_is_known_of_its_state(
        self,
        engine: CoreEngine,
        backend: EngineBackend,
        health: object,
        admission: Admission,
        weights: WeightsState,
        troubles: tuple[str, ...],
    ) -> None:
        engine.health = health
        found = await backend.discover(2.0)
        assert (found.facts.admission, found.facts.weights.state) == (admission, weights)
        assert found.troubles == troubles

    async def test_adapters_are_offered_where_they_can_be_listed(
        self, engine: CoreEngine, backend: EngineBackend
    ) -> None:
        engine.loras = None
        found = await backend.discover(2.0)
        assert found.capabilities.operations == {K.ABORT_REQUESTS}

    async def test_the_revision_rises_with_what_a_reading_changes(
        self, engine: CoreEngine, backend: EngineBackend, states: States
    ) -> None:
        assert engine.loras is not None
        for _ in range(2):
            assert (await backend.discover(2.0)).facts.revision == 0
        await told(backend, order(SQL))
        first = (await backend.discover(2.0)).facts
        assert (first.revision, [lora.name for lora in first.loras]) == (1, ["sql"])
        engine.loras.clear()  # somebody else
        assert (await backend.discover(2.0)).facts.revision == 2
        await engine.restart()
        again = (await backend.discover(5.0)).facts
        assert (again.revision, again.instance_id) == (3, "core-1+")
        states.taken = 1  # by another gateway, which has read the same
        engine.loras["x"] = SQL_ADAPTER
        assert (await backend.discover(2.0)).facts.revision == 4

    async def test_one_that_grows_is_described_as_it_is_then(
        self, engine: CoreEngine, backend: EngineBackend
    ) -> None:
        async def told() -> tuple[int | None, object]:
            found = await backend.discover(2.0)
            return found.capabilities.world_size, found.info["parallelism"]

        before, engine.data_parallel_size = await told(), 3
        after = await told()
        assert (before[0], after[0]) == (2, 6)
        assert before[1] != after[1]

    async def test_the_order_of_a_list_is_no_change(
        self, engine: CoreEngine, backend: EngineBackend
    ) -> None:
        assert engine.loras is not None
        twice = [lora_pb2.LoraAdapter(lora_name="x", lora_id=number) for number in (1, 2)]
        revisions = set()
        for listed in (twice, twice[::-1]):
            engine.loras = {str(place): one for place, one in enumerate(listed)}
            revisions.add((await backend.discover(2.0)).facts.revision)
        assert len(revisions) == 1

    async def test_a_row_of_another_dialect_keeps_its_counters(
        self, backend: EngineBackend, states: States
    ) -> None:
        states.rows["e1"] = KeptState(
            number=4, revision=9, pause_epoch=2, release_epoch=1, document={"instance_ids": []}
        )
        assert (await backend.discover(2.0)).facts.revision == 10
        assert (states.rows["e1"].number, states.rows["e1"].pause_epoch) == (5, 2)

    async def test_an_engine_that_has_the_service_is_not_taken_for_one_without(
        self, engine: CoreEngine, backend: EngineBackend
    ) -> None:
        """Then something in between has answered, or the address is its other listener's."""
        engine.extra = {"openengine_admin": True}
        with pytest.raises(EngineSilent) as silent:
            await backend.discover(2.0)
        assert silent.value.reason is Silence.REFUSED
        with pytest.raises(EngineSilent):
            await backend.find("op-1", 2.0)

    async def test_one_that_does_not_say_which_process_it_is_is_not_understood(
        self, engine: CoreEngine, backend: EngineBackend
    ) -> None:
        engine.instance_id = ""
        with pytest.raises(EngineSilent) as silent:
            await backend.discover(2.0)
        assert silent.value.reason is Silence.MALFORMED


class TestOrders:
    @pytest.mark.parametrize(
        "command", [Pause(mode=PauseMode.DRAIN), FlushCaches(caches=(CacheKind.PREFIX,))]
    )
    async def test_what_needs_the_service_is_refused(
        self, backend: EngineBackend, command: Command
    ) -> None:
        with pytest.raises(EngineRefused) as refused:
            await told(backend, order(command))
        assert refused.value.error.code == "UNIMPLEMENTED"
        with pytest.raises(EngineRefused):
            await backend.cancel("x", 2.0)

    async def test_requests_are_ended(self, engine: CoreEngine, backend: EngineBackend) -> None:
        engine.running = {"r-1": asyncio.Event(), "r-2": asyncio.Event()}
        engine.next("Abort", Refuse(C.INTERNAL))
        wanted = AbortRequests(request_ids=("r-1", "r-2", "r-3"))
        end = (await told(backend, order(wanted)))[-1]
        assert isinstance(end, Completed)
        rows = cast("list[JsonObject]", end.result["requests"])
        outcomes = sorted(str(row["outcome"]) for row in rows)
        assert outcomes == ["aborted", "already_finished", "unverified"]
        assert end.verification is Verification.UNVERIFIED
        end = (await told(backend, order(AbortRequests(all=True))))[-1]
        assert isinstance(end, Completed)
        assert end.result["all"] == "aborted"

    async def test_an_adapter_is_loaded_seen_and_unloaded(
        self, engine: CoreEngine, backend: EngineBackend
    ) -> None:
        end = (await told(backend, order(SQL)))[-1]
        assert isinstance(end, Completed)
        assert end.result == {
            "changed": True,
            "lora": {"name": "sql", "id": 1, "path": "/loras/sql"},
        }
        assert (end.verification, end.revision) == (Verification.VERIFIED, 1)
        stale = replace(order(UnloadLora(name="sql")), expected_revision=0)
        with pytest.raises(EngineRefused) as refused:
            await told(backend, stale)
        assert refused.value.error.reason == "REVISION_MISMATCH"
        end = (await told(backend, order(UnloadLora(name="sql"))))[-1]
        assert isinstance(end, Completed)
        assert end.revision == 2
        with pytest.raises(EngineRefused) as refused:
            await told(backend, order(UnloadLora(name="sql")))
        assert refused.value.error.code == "NOT_FOUND"

    async def test_it_keeps_no_record(self, backend: EngineBackend) -> None:
        assert await backend.find("op-1", 2.0) is None

    async def test_a_lost_reply_is_made_good_by_looking_and_never_by_guessing(
        self, engine: CoreEngine, backend: EngineBackend
    ) -> None:
        engine.next("LoadLora", Lost())
        with pytest.raises(OutcomeLost):
            await told(backend, order(SQL))
        shown = await backend.read_back(order(SQL), "core-1", 2.0)
        assert isinstance(shown, Completed)
        assert shown.result["lora"] == {"name": "sql", "id": 1, "path": "/loras/sql"}
        other = order(LoadLora(name="other", path="/loras/other"))
        with pytest.raises(StillRunning):  # it does not tell what it is at
            await backend.read_back(other, "core-1", 2.0)
        await engine.restart()
        assert await backend.read_back(other, "core-1", 5.0) is None
