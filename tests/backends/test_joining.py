"""A trainer's group, joined by a call of its own."""

from __future__ import annotations

import grpc
import pytest

from app.backends.port import EngineBackend, EngineRefused, EngineSilent, JoinsGroups
from app.domain.kinds import CollectiveBackend
from app.domain.weight_sessions import NcclTransfer
from tests.backends.scripted_engine import ScriptedEngine, status_with_info

pytestmark = pytest.mark.anyio

_C = grpc.StatusCode
GROUP = NcclTransfer(
    address="::1",
    port=29500,
    world_size=3,
    rank_offset=1,
    backend=CollectiveBackend.GLOO,
    group="g",
)


async def join(backend: EngineBackend) -> bool:
    assert isinstance(backend, JoinsGroups)
    return await backend.join_group(GROUP, 2.0)


async def test_it_is_in(engine: ScriptedEngine, backend: EngineBackend) -> None:
    assert await join(backend) is True
    assert engine.calls[-1] == ("JoinGroup", "g")


@pytest.mark.parametrize(
    "said", [_C.UNIMPLEMENTED, status_with_info(_C.UNIMPLEMENTED, "UNSUPPORTED_OPERATION")]
)
async def test_others_join_with_the_session(
    engine: ScriptedEngine, backend: EngineBackend, said: object
) -> None:
    engine.read_refusal = said
    assert await join(backend) is False


async def test_a_refusal_says_why(engine: ScriptedEngine, backend: EngineBackend) -> None:
    engine.read_refusal = status_with_info(_C.INVALID_ARGUMENT, "RENDEZVOUS_NOT_ALLOWED")
    with pytest.raises(EngineRefused) as refused:
        await join(backend)
    assert refused.value.error.reason == "RENDEZVOUS_NOT_ALLOWED"


async def test_no_answer_is_no_refusal(engine: ScriptedEngine, backend: EngineBackend) -> None:
    engine.answering.clear()
    with pytest.raises(EngineSilent):
        await join(backend)
    engine.answering.set()
    await engine.stop()
    with pytest.raises(EngineSilent):
        await join(backend)
