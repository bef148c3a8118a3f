"""Traces: what the profiler writes is believed only when it has been read."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from pathlib import Path

import pytest

from app.reference_engine.profiler import MemoryRecorder
from app.reference_engine.trace_file import TraceInvalid, check, main, pack

HEAD = '{"schemaVersion": 1, "note": "\\"traceEvents\\": [", "traceEvents": ['
EVENT = '{"ph": "X", "ts": 1.5, "name": "aten::mm", "dur": 2}'


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}]}}",
        f'{HEAD}\n {EVENT},\n{EVENT} ], "traceName": "x"}}',
        f"{HEAD}{EVENT},{EVENT}]}}\n",
    ],
)
def test_whole_traces_are_packed_with_what_they_are_of(text: str, tmp_path: Path) -> None:
    raw = tmp_path / "rank-0.json"
    raw.write_text(text)
    packed = pack(raw, {"rank": 0, "profiler": "torch"})
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.json.gz"]
    content = packed.path.read_bytes()
    assert (packed.size_bytes, packed.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    found = json.loads(gzip.decompress(content))
    assert found.pop("chadburn") == {"rank": 0, "profiler": "torch"}
    assert found == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        HEAD,
        f"{HEAD}{EVENT}",
        f"{HEAD}{EVENT[:20]}",
        f"{HEAD}{EVENT}]",
        f"{HEAD}{EVENT}{EVENT}]}}",
        f"{HEAD}{EVENT},]}}",
        f"{HEAD},{EVENT}]}}",
        f"{HEAD}{EVENT}]}}{{",
        f'{HEAD}{{"ph": "X", "ts": 1}}]}}',
        f'{HEAD}{{"ph": "X", "ts": NaN, "name": "x"}}]}}',
        f"{HEAD}[1, 2]]}}",
        f'{HEAD}{EVENT}], "a": Infinity}}',
    ],
)
def test_what_no_viewer_could_read_is_refused(text: str) -> None:
    with pytest.raises(TraceInvalid):
        check(text)


def test_the_process_answers_in_one_document(tmp_path: Path) -> None:
    (tmp_path / "whole.json").write_text(f"{HEAD}{EVENT}]}}")
    (tmp_path / "cut.json").write_text(f"{HEAD}{EVENT}")

    def answer(name: str) -> dict[str, object]:
        said = io.StringIO()
        asked = [{"path": str(tmp_path / name), "about": {}}]
        main(io.StringIO(json.dumps(asked)), said, niceness=0)
        found = json.loads(said.getvalue())
        assert isinstance(found, dict)
        return found

    assert list(answer("whole.json")) == ["files"]
    assert answer("cut.json") == {"error": "invalid", "message": "it is not whole"}
    assert answer("none.json")["error"] == "unwritable"


def test_a_long_recording_of_memory_becomes_coarser_and_stays_bounded(tmp_path: Path) -> None:
    clock = iter(range(0, 10**12, 3_000_000))
    sizes = {"resident set": 5}
    recorder = MemoryRecorder(lambda: sizes, now_ns=lambda: next(clock), most_samples=64)
    recorder.prepare()
    recorder.begin()
    for number in range(1000):
        with recorder.step(number):
            sizes = {"resident set": number}
    recorder.end()
    recorder.save(tmp_path / "memory.json")
    text = (tmp_path / "memory.json").read_text()
    check(text)
    counters = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "C"]
    seen = [event["args"]["bytes"] for event in counters]
    assert (seen[0], seen[-1]) == (5, 999)
    assert 16 < len(seen) <= 64
    assert seen == sorted(seen[:1]) + sorted(seen[1:])
    times = [event["ts"] for event in counters]
    assert times == sorted(times)
