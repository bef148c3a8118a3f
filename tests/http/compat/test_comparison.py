"""Recorded answers of vLLM beside the layer's: nothing differs that has no reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.http.compat.comparison import DIFFERENCES, REASONS, compared, document
from tests.http.compat.layered import layered

pytestmark = pytest.mark.anyio

DOCUMENT = Path(__file__).parents[3] / "docs" / "vllm-comparison.md"


@pytest.mark.long
async def test_nothing_differs_without_a_reason(tmp_path: Path) -> None:
    async with layered(tmp_path, flavour="0.32") as vllm:
        rows = await compared(vllm)
    assert [row for row in rows if not row.explained] == []
    assert {row.name for row in rows} >= set(DIFFERENCES)
    assert set(REASONS) == set(DIFFERENCES.values())
    assert DOCUMENT.read_text() == document(rows), "run scripts/gen-vllm-comparison"
