"""A trace is taken when it is whole, however long its writer takes."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
from pathlib import Path

import pytest

from app.enginekit.runtime import RuntimeFault
from app.sidecars.traces import Traces

pytestmark = pytest.mark.anyio


async def test_a_trace_that_is_still_written(tmp_path: Path) -> None:
    traces = Traces(tmp_path, re.compile(r"TP-(\d+)"))
    packed = gzip.compress(os.urandom(100_000))
    file = tmp_path / "x-TP-3.trace.json.gz"
    for so_far in (1, 10, 50_000, len(packed) - 1):
        file.write_bytes(packed[:so_far])
        with pytest.raises(RuntimeFault) as caught:
            await traces.artifacts()
        assert caught.value.reason == "NO_ARTIFACT"
    assert not await traces.settled(1, within_s=1.1)

    file.write_bytes(packed)
    assert await traces.settled(1, within_s=60)
    (artifact,) = await traces.artifacts()
    assert (artifact.rank, artifact.size_bytes) == (3, len(packed))
    assert artifact.sha256 == hashlib.sha256(packed).digest()
    assert not await traces.settled(2, within_s=1.1)  # a rank lacks


async def test_what_is_not_packed_counts_as_it_is(tmp_path: Path) -> None:
    traces = Traces(tmp_path, re.compile(r"rank(\d+)"))
    (tmp_path / "rank0.json").write_bytes(b"{")
    (tmp_path / "rank1.json.gz").write_bytes(b"trace")
    assert await traces.settled(2, within_s=60)
    assert [one.rank for one in await traces.artifacts()] == [0, 1]
