from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.http.compat.layered import Layered, layered


@pytest.fixture
async def sglang(tmp_path: Path) -> AsyncIterator[Layered]:
    async with layered(tmp_path, layer="sglang") as made:
        yield made
