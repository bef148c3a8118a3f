"""The double answers what the real server answered: its recorded calls are replayed against it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.doubles.vllm_http import running_vllm
from tests.sidecars.checkpoints import checkpoint

pytestmark = pytest.mark.anyio

RECORDED = Path(__file__).parents[1] / "doubles" / "vllm_recorded.jsonl"


def _scenarios() -> Iterator[Any]:
    calls = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    for name, group in groupby(calls, key=lambda call: call["scenario"]):
        yield pytest.param(list(group), id=name)


def _shape(status: int, body: str) -> Any:
    """Of an error of validation what it is about; the rest is the words of a library."""
    try:
        found = json.loads(body)
    except ValueError:
        return body
    error = found.get("error") if isinstance(found, dict) else None
    if status == 400 and isinstance(error, dict) and "validation" in error["message"]:
        return {**error, "message": "", "param": None}
    return found


def _like(status: int, wanted: Any, found: Any) -> bool:
    if status == 400 and isinstance(wanted, dict) and wanted.get("message") == "":
        error = found.get("error", {})
        return bool(error.get("code") == wanted["code"] and error.get("type") == wanted["type"])
    return bool(wanted == found)


@pytest.mark.parametrize("calls", list(_scenarios()))
async def test_as_recorded(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    model = checkpoint(tmp_path / "tiny", 1)
    (tmp_path / "lora_a").mkdir()
    settings = {"flavour": calls[0]["flavour"], "backend": "file"}
    async with (
        running_vllm(model, model=settings, device="cpu") as vllm,
        httpx2.AsyncClient(base_url=vllm.url, trust_env=False) as http,
    ):
        vllm.model.initialised = True
        for call in calls:
            body = call["body"]
            if body is not None:
                body = body.replace("/srv/vllm", str(tmp_path))
            response = await http.request(
                call["method"],
                call["path"],
                content=body,
                headers={} if body is None else {"Content-Type": "application/json"},
            )
            assert response.status_code == call["status"], call
            wanted = _shape(call["status"], call["answer"].replace("/srv/vllm", str(tmp_path)))
            try:
                found = response.json()
            except ValueError:
                found = response.text
            assert _like(call["status"], wanted, found), (call, found)
