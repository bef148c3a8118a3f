"""Recorded answers of SGLang beside the layer's: nothing differs that has no reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.http.compat.layered import OneRank, layered
from tests.http.compat.sglang.comparison import DIFFERENCES, REASONS, compared, document

pytestmark = pytest.mark.anyio

DOCUMENT = Path(__file__).parents[4] / "docs" / "sglang-comparison.md"


async def test_nothing_differs_without_a_reason(tmp_path: Path) -> None:
    async with layered(tmp_path, layer="sglang", engine=OneRank) as sglang:
        rows = await compared(sglang)
    assert [row for row in rows if not row.explained] == []
    assert {row.name for row in rows} >= set(DIFFERENCES)
    assert set(REASONS) == set(DIFFERENCES.values())
    assert DOCUMENT.read_text() == document(rows), "run scripts/gen-sglang-comparison"
