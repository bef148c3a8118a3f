"""New weights while requests come and go: each request is of one version, or changes at one token.

Float32 and one request a batch, so that what two ranks say can be compared token by token with
what a fresh engine says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import generation_pb2
from tests.reference_engine.calling import Call, Heard
from tests.robustness.lines import ABORT, DRAIN, KEEP
from tests.robustness.stage import Stage, fresh, stage

pytestmark = pytest.mark.anyio

CLIENTS = 3
_TRIES = 5
LONG = 240  # tokens: an order is surely carried out in the midst of them
AFTER = 1  # requests that each client still sends when the update is over
LENGTH = generation_pb2.FINISH_REASON_LENGTH
CANCELLED = generation_pb2.FINISH_REASON_CANCELLED


@pytest.fixture(scope="module")
async def two(
    versions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("two")
    async with stage(folder, versions, ranks=2, rank_timeout_s=60.0, max_running=1) as made:
        yield made


async def traffic(
    stage: Stage, mode: pb.PauseMode.ValueType, cache: pb.CachePolicy.ValueType
) -> tuple[list[Heard], pb.AdminOperation, str, str]:
    """Every answer that clients had around one update, the update, and the versions before and
    after."""
    old, new = await stage.version(), await stage.other_version()
    heard: list[Heard] = []
    over = asyncio.Event()
    begun = [asyncio.Event() for _ in range(CLIENTS)]

    async def client(number: int) -> None:
        left = AFTER
        while left:
            left -= over.is_set()
            heard.append(await stage.ask().whole())
            begun[number].set()

    clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
    for one in begun:
        await one.wait()
    told = stage.clients.update(
        new, disk=stage.disk(new), cache_policy=cache, pause=pb.PauseAround(mode=mode)
    )
    await told.completed()
    over.set()
    await asyncio.gather(*clients)
    asked = pb.GetAdminOperationRequest(operation_id=told.events[0].operation_id)
    operation = await stage.clients.admin.GetOperation(asked)
    return heard, operation, old, new


def of(heard: Heard, stage: Stage, version: str) -> bool:
    return heard.ids == stage.expected(version)


async def test_drain_lets_no_request_see_both(two: Stage) -> None:
    heard, operation, old, new = await traffic(two, DRAIN, pb.CACHE_POLICY_FLUSH)
    assert list(operation.completed.update_weights.switched) == []
    for one in heard:
        assert one.finished is not None
        assert one.finished.reason == LENGTH
        assert of(one, two, old) != of(one, two, new)
    assert any(of(one, two, old) for one in heard)
    assert sum(of(one, two, new) for one in heard) >= CLIENTS * AFTER


async def test_abort_ends_what_the_earlier_version_began(two: Stage) -> None:
    heard, operation, old, new = await traffic(two, ABORT, pb.CACHE_POLICY_FLUSH)
    assert list(operation.completed.update_weights.switched) == []
    cut = [one for one in heard if one.finished and one.finished.reason == CANCELLED]
    assert len(cut) == CLIENTS
    for one in heard:
        assert one.finished is not None
        if one in cut:
            assert one.ids == two.expected(old)[: len(one.ids)]
        else:
            assert of(one, two, old) != of(one, two, new)
    assert sum(of(one, two, new) for one in heard) >= CLIENTS * AFTER


async def frozen(
    stage: Stage, cache: pb.CachePolicy.ValueType
) -> tuple[list[int], int, pb.AdminOperation, str, str]:
    """One request in flight over an update: what it said, and where the version changed."""
    for _ in range(_TRIES):
        old, new = await stage.version(), await stage.other_version()
        call: Call = await stage.ask(LONG).after(5)
        told = stage.clients.update(
            new, disk=stage.disk(new), cache_policy=cache, pause=pb.PauseAround(mode=KEEP)
        )
        completed = await told.completed()
        if completed.update_weights.switched:
            break
        # The request was over first, as it may be on a machine that does other things besides.
        assert len((await call.whole()).ids) == LONG
    (switched,) = completed.update_weights.switched
    assert switched.request_id == call.request_id
    asked = pb.GetAdminOperationRequest(operation_id=told.events[0].operation_id)
    operation = await stage.clients.admin.GetOperation(asked)
    heard = await call.whole()
    assert heard.finished is not None
    assert len(heard.ids) == LONG
    assert 5 <= switched.output_tokens < LONG
    return heard.ids, switched.output_tokens, operation, old, new


async def test_keep_changes_the_version_at_one_recorded_token(two: Stage) -> None:
    ids, at, operation, old, new = await frozen(two, pb.CACHE_POLICY_FLUSH)
    assert list(operation.warnings) == []
    assert tuple(ids[:at]) == fresh(two.versions[old], at)
    assert tuple(ids[at:]) == fresh(two.versions[new], LONG - at, tuple(ids[:at]))
    assert await two.serves(new)


async def test_keep_with_the_old_cache_says_so(two: Stage) -> None:
    """What follows is computed by the new weights on keys and values of the old ones: neither
    version's own output, and that is told."""
    ids, at, operation, old, new = await frozen(two, pb.CACHE_POLICY_KEEP)
    assert [warning.reason for warning in operation.warnings] == ["CACHE_KEPT"]
    assert tuple(ids[:at]) == fresh(two.versions[old], at)
    assert tuple(ids) != fresh(two.versions[old], LONG)
    assert operation.completed.update_weights.updates_since_flush == 1
    await two.clients.flush()
    assert await two.serves(new)
