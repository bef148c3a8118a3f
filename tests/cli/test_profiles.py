"""Profiles and inline tensors: what the verbs ask for, and what they leave on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.scripted import Answer, Gateway, Seen, operation

TRACE = "a whole trace"


def artifact(rank: int, content: str = TRACE) -> dict[str, Any]:
    return {
        "rank": rank,
        "path": f"p-1/rank-{rank}.json.gz",
        "size_bytes": len(content),
        "sha256": hashlib.sha256(content.encode()).hexdigest(),
        "media_type": "application/gzip",
        "download": None,
    }


PROFILE = {
    "id": "op-1",
    "profiler": "torch",
    "state": "ready",
    "created_at": "2026-03-01T12:00:00Z",
    "artifacts": [artifact(0), artifact(1)],
}


def serving(seen: Seen) -> Answer:
    if "artifact" in seen.path:
        return Answer(200, text=TRACE, kind="application/gzip")
    return Answer(200, PROFILE)


def test_stopping_takes_no_key(at: Run, gateway: Gateway) -> None:
    gateway.then(Answer(202, operation("running", kind="profile")))
    assert at("profile", "stop", "e", "p/1", "--reason", "enough").code == 0
    (seen,) = gateway.seen
    assert (seen.path, seen.body) == ("/v1/engines/e/profiles/p%2F1/stop", {"reason": "enough"})
    assert "idempotency-key" not in seen.headers


def test_those_that_were_ordered(at: Run, gateway: Gateway) -> None:
    gateway.then(Answer(200, {"items": [PROFILE], "next_page_token": None}))
    ran = at("profile", "list", "e")
    assert [line.split() for line in ran.out.splitlines()] == [
        ["PROFILE", "PROFILER", "STATE", "ORDERED", "FILES"],
        ["op-1", "torch", "ready", "2026-03-01T12:00:00Z", "2"],
    ]
    assert json.loads(at("profile", "list", "e", "--json").out) == {"items": [PROFILE]}
    gateway.then(serving)
    at("profile", "list", "e")
    assert json.loads(at("profile", "get", "e", "op-1").out) == PROFILE


def test_files_are_fetched_whole(at: Run, gateway: Gateway, tmp_path: Path) -> None:
    gateway.then(serving)
    into = tmp_path / "new" / "folder"
    ran = at("profile", "download", "e", "op-1", "--into", str(into))
    assert ran.code == 0, ran.err
    names = [f"op-1-rank-{rank}.json.gz" for rank in (0, 1)]
    assert ran.out.splitlines() == [str(into / name) for name in names]
    assert sorted(path.name for path in into.iterdir()) == names
    assert (into / names[1]).read_text() == TRACE
    assert [seen.path for seen in gateway.seen[1:]] == [
        f"/v1/engines/e/profiles/op-1/artifact?rank={rank}" for rank in (0, 1)
    ]
    assert at("profile", "download", "e", "op-1", "--into", str(into), "--rank", "1").code == 0
    assert len(gateway.seen) == 5


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (Answer(200, text="a whole trick"), 1, "not what was announced"),
        (Answer(200, text="a who"), 1, "not what was announced"),
        (Answer(501, {"title": "Not from here", "reason": "ARTIFACTS_NOT_REACHABLE"}), 6, "Not fr"),
        (Answer(drop=True), 7, "no answer"),
    ],
)
def test_a_file_that_does_not_come_whole_is_not_there(
    at: Run, gateway: Gateway, tmp_path: Path, answer: Answer, code: int, said: str
) -> None:
    gateway.then(Answer(200, PROFILE)).then(answer)
    ran = at("profile", "download", "e", "op-1", "--into", str(tmp_path), "--rank", "0")
    assert ran.code == code
    assert said in ran.err
    assert list(tmp_path.glob("*rank*")) == []


def test_what_has_no_files_is_said_so(at: Run, gateway: Gateway, tmp_path: Path) -> None:
    gateway.then(Answer(200, {**PROFILE, "state": "running", "artifacts": []}))
    ran = at("profile", "download", "e", "op-1", "--into", str(tmp_path))
    assert (ran.code, len(gateway.seen)) == (6, 1)
    assert "running" in ran.err
    gateway.then(Answer(200, PROFILE))
    at("profile", "get", "e", "op-1")
    ran = at("profile", "download", "e", "op-1", "--into", str(tmp_path), "--rank", "7")
    assert ran.code == 6


UPDATE = ("update-weights", "e", "--weight-version", "v2", "--pause", "drain", "--inline")


def safetensors(path: Path, header: dict[str, Any], content: bytes) -> Path:
    said = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(said)) + said + content)
    return path


def test_a_safetensors_file_goes_with_the_order(at: Run, gateway: Gateway, tmp_path: Path) -> None:
    gateway.then(Answer(202, operation("accepted")))
    header = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [4, 8]},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    }
    path = safetensors(tmp_path / "w", header, b"12345678")
    assert at(*UPDATE, str(path)).code == 0
    sent = gateway.seen[0].body["source"]["tensors"]["inline"]["tensors"]
    assert sent == [
        {
            "name": "b",
            "dtype": "bfloat16",
            "shape": [2],
            "data": base64.b64encode(b"5678").decode(),
        },
        {"name": "a", "dtype": "float32", "shape": [], "data": base64.b64encode(b"1234").decode()},
    ]


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 12]},
        {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        "F32",
    ],
)
def test_what_is_none_is_not_sent(at: Run, gateway: Gateway, tmp_path: Path, entry: Any) -> None:
    path = safetensors(tmp_path / "w", {"a": entry}, b"12345678")
    ran = at(*UPDATE, str(path))
    assert (ran.code, gateway.seen) == (2, [])
    assert "no safetensors file" in ran.err
