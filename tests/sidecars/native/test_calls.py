"""What a call to an engine's own listener proves."""

from __future__ import annotations

import grpc
import pytest

from app.sidecars.http import CallError, NoAnswer, NotSent, Patience, Refused
from app.sidecars.native.client import C, NativeClient, fail
from tests.doubles.core_engine import Never, Refuse, running_core_engine

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("code", "details", "proved"),
    [
        (C.UNAVAILABLE, "failed to connect to all addresses; last error: refused", NotSent),
        (C.UNAVAILABLE, "recvmsg: Connection reset by peer", NoAnswer),
        (C.UNAVAILABLE, "Socket closed", NoAnswer),
        (C.DEADLINE_EXCEEDED, "Deadline Exceeded", NoAnswer),
        (C.INTERNAL, "aborted 1 request(s); 1 could not be aborted", NoAnswer),
        (C.INVALID_ARGUMENT, "no target", Refused),
        (C.UNIMPLEMENTED, "", Refused),
    ],
)
def test_by_its_status(code: grpc.StatusCode, details: str, proved: type[CallError]) -> None:
    none = grpc.aio.Metadata()
    with pytest.raises(CallError) as told:
        fail(grpc.aio.AioRpcError(code, none, none, details=details))
    assert type(told.value) is proved


async def test_nobody_is_waited_for_beyond_the_patience() -> None:
    patience = Patience(read_s=0.2)
    async with running_core_engine() as engine:
        client = NativeClient(engine.address, patience)
        engine.next("Health", Never(), Refuse(C.UNIMPLEMENTED))
        with pytest.raises(NoAnswer):
            await client.health()
        with pytest.raises(Refused):
            await client.health()
        await engine.stop()
        with pytest.raises(CallError):
            await client.health()
        await client.close()
    client = NativeClient("127.0.0.1:1", patience)
    with pytest.raises(NotSent):
        await client.health()
    await client.close()
