"""The sidecar beside real SGLang, and the gateway in front of both."""

from __future__ import annotations

import pytest

from tests.e2e.driving import Gateway
from tests.real.gateway import ENGINE
from tests.real.orders import Orders

pytestmark = pytest.mark.anyio


async def test_flushed(bridge: Gateway) -> None:
    await bridge.does(ENGINE, "flush-caches", {"caches": ["prefix"]})


class TestOrders(Orders):
    adapter = "tiny:{}"
