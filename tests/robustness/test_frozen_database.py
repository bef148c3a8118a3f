"""A gateway whose database stands still: connected, and without a word."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.http.gateway import gateway
from tests.postgres import running_server

pytestmark = pytest.mark.anyio


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_gateway_ends_with_something_to_write_and_nobody_who_takes_it(
    tmp_path: Path,
) -> None:
    with running_server() as database:
        database.execute("CREATE DATABASE frozen")
        async with AsyncExitStack() as running:
            settings: dict[str, Any] = {
                "database_url": database.url("frozen"),
                "shutdown_grace_s": 1.0,
            }
            gate = await running.enter_async_context(
                gateway(tmp_path, registered=False, **settings)
            )
            # Counted, and written down when the minute is over, or at the end.
            assert (await gate.http.get("/v1/engines")).status_code == 401
            with database.frozen():
                await running.aclose()
