"""Weights that a trainer has pickled, where that is allowed: unread, and once."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.domain.engine_payloads import SGLANG_TENSORS, EnginePayloadChunk
from tests.doubles.sglang_payloads import in_base64, pickled
from tests.enginekit.client import pb
from tests.enginekit.session_engine import Sender
from tests.sidecars.checkpoints import NAMES
from tests.sidecars.sglang.running import Served, served

pytestmark = pytest.mark.anyio

TENSOR = "/update_weights_from_tensor"
WAY: dict[str, Any] = {
    "transfer": {"engine_payload": pb.EnginePayloadTransfer(format=SGLANG_TENSORS)},
    "under_pause": pb.UnderPause(),
}
PARTS = [pickled({name: (2, 2)}, f"/shm_{name}") for name in NAMES]


def piece(*parts: bytes, load_format: str | None = None) -> dict[str, Any]:
    return {"engine_payload": pb.EnginePayloadChunk(parts=parts, load_format=load_format)}


async def step(
    it: Served, version: str, *pieces: dict[str, Any], check_finite: bool = False
) -> Any:
    """Its last event. The engine stays paused."""
    sender = Sender(it.client, f"session-{version}")
    request = sender.begin(version, check_finite=check_finite, **WAY)
    begun = await it.client.begin(request)
    for index, one in enumerate(pieces):
        try:
            await sender.sent(sender.chunk(index, payload=one))
        except grpc.aio.AioRpcError:
            break  # the session has ended over an earlier one
    with contextlib.suppress(grpc.aio.AioRpcError):
        await sender.sent(sender.commit(len(pieces)))
    return await begun.end()


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path, pickled=True) as made:
        yield made


async def paused(it: Served) -> int:
    done = await it.client.completed(it.client.pause("abort"))
    return int(done.pause.pause_epoch)


async def test_it_is_passed_on_unread_and_the_evidence_is_the_engine_s(it: Served) -> None:
    profile = await it.client.profile()
    assert list(profile.payload_formats) == [SGLANG_TENSORS]
    epoch = await paused(it)
    before = dict(it.model.sums)
    ended = await step(it, "v2", *(piece(part, load_format="direct") for part in PARTS))
    assert ended.HasField("completed"), ended
    assert ended.completed.verification == pb.VERIFICATION_VERIFIED
    sent = it.sglang.bodies(TENSOR)
    assert [one["serialized_named_tensors"] for one in sent] == [[in_base64(p)] for p in PARTS]
    assert {one["load_format"] for one in sent} == {"direct"}
    assert it.model.version == "v2"
    assert all(it.model.sums[name] != before[name] for name in NAMES)
    await it.client.completed(it.client.resume(epoch))
    assert await it.generates()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (piece(PARTS[0], PARTS[1]), "PAYLOAD_UNFIT"),
        (piece(b"\x80\x04]"), "PAYLOAD_UNFIT"),
        (piece(b"garbage."), "PAYLOAD_UNFIT"),
        (piece(PARTS[0], load_format="bogus"), "PAYLOAD_UNFIT"),
        (None, "PAYLOAD_UNFIT"),
    ],
)
async def test_what_can_be_told_without_reading_is_refused_before_anything_is_touched(
    it: Served, bad: dict[str, Any] | None, reason: str
) -> None:
    epoch = await paused(it)
    ended = await step(it, "v2", *([] if bad is None else [bad]))
    assert ended.failed.reason == reason
    assert it.sglang.orders(TENSOR, "/begin_weight_update") == []
    await it.client.completed(it.client.resume(epoch))
    assert await it.generates()


@pytest.mark.long
async def test_infinities_cannot_be_looked_for(it: Served) -> None:
    await paused(it)
    ended = await step(it, "v2", check_finite=True)
    assert ended.failed.reason == "TRANSFER_NOT_OFFERED"


async def test_the_same_payload_never_reaches_the_engine_twice(it: Served) -> None:
    """Nor in another session; what was sent is remembered on disk."""
    await paused(it)
    pieces = [piece(part) for part in PARTS]
    assert (await step(it, "v2", *pieces)).HasField("completed")
    again = await step(it, "v3", pieces[0])
    assert again.failed.reason == "PAYLOAD_ALREADY_SENT"
    assert len(it.sglang.bodies(TENSOR)) == len(PARTS)
    assert it.model.version == "v2"
    assert not it.model.dead
    kept = [path.read_text() for path in it.sidecar.settings.kit.data_dir.rglob("*.json")]
    digest = EnginePayloadChunk((PARTS[0],)).sha256
    assert any(digest in text for text in kept)


async def test_weights_that_were_nobody_s_are_the_caller_s_word(it: Served) -> None:
    """What breaks off leaves weights that serve nobody until an update is good; a good one that
    nobody has read is no proof that they are whole."""
    await paused(it)
    first = await step(it, "v2", piece(PARTS[0]), piece(PARTS[0]))
    assert first.failed.reason == "PAYLOAD_ALREADY_SENT"
    state = (await it.client.profile()).state
    assert state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
    with pytest.raises(grpc.aio.AioRpcError):
        await it.client.completed(it.client.resume((await it.client.profile()).pause_epoch))
    anew = [pickled({name: (2, 2)}, f"/anew_{name}") for name in NAMES]
    ended = await step(it, "v3", *(piece(part) for part in anew))
    assert ended.HasField("completed")
    assert ended.completed.verification == pb.VERIFICATION_UNVERIFIED
    await it.client.completed(it.client.resume((await it.client.profile()).pause_epoch))
    assert await it.generates()


async def test_a_lie_of_success_is_no_proof(it: Served) -> None:
    await paused(it)
    it.model.lie_of_success = True
    ended = await step(it, "v2", *(piece(part) for part in PARTS))
    assert ended.HasField("completed")
    assert ended.completed.verification == pb.VERIFICATION_UNVERIFIED


async def test_by_default_there_is_none(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        profile = await it.client.profile()
        assert list(profile.payload_formats) == []
        assert pb.WEIGHT_TRANSFER_BACKEND_ENGINE_PAYLOAD not in profile.weight_sessions
        await paused(it)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await step(it, "v2", piece(PARTS[0]))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert it.sglang.orders(TENSOR) == []
