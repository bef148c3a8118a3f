from __future__ import annotations

import gc
import weakref

import grpc
import pytest

from app.backends import stubs
from app.rpc.openengine.v1 import admin_pb2_grpc, openengine_pb2_grpc

pytestmark = pytest.mark.anyio


async def test_one_for_each_channel_and_service() -> None:
    one, other = (grpc.aio.insecure_channel(f"127.0.0.1:{port}") for port in (1, 2))
    admin = stubs.stub_of(admin_pb2_grpc.OpenEngineAdminStub, one)
    assert stubs.stub_of(admin_pb2_grpc.OpenEngineAdminStub, one) is admin
    assert stubs.stub_of(admin_pb2_grpc.OpenEngineAdminStub, other) is not admin
    assert isinstance(
        stubs.stub_of(openengine_pb2_grpc.ControlStub, one), openengine_pb2_grpc.ControlStub
    )
    for channel in (one, other):
        await channel.close()


async def test_they_go_with_their_channel() -> None:
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    stubs.stub_of(admin_pb2_grpc.OpenEngineAdminStub, channel)
    still = weakref.ref(channel)
    await channel.close()
    del channel
    gc.collect()
    assert still() is None
