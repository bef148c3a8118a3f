"""The double answers what the real server answered: its recorded calls are replayed against it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.conformance.tensors import Tensor, written
from tests.doubles.sglang_http import running_sglang
from tests.enginekit.client import until
from tests.sidecars.checkpoints import adapter

pytestmark = pytest.mark.anyio

# Of the recorded model as much as calls speak of.
TINY = (
    Tensor("model.norm.weight", "BF16", (64,), bytes(128)),
    Tensor("model.layers.0.self_attn.q_proj.weight", "BF16", (64, 64), bytes(8192)),
)
RECORDED = Path(__file__).parents[2] / "doubles" / "sglang_recorded.jsonl"


def _scenarios() -> Iterator[Any]:
    calls = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    for name, group in groupby(calls, key=lambda call: call["scenario"]):
        yield pytest.param(list(group), id=name)


def _like(wanted: Any, found: Any) -> bool:
    """Of objects the fields that were recorded; of a validation error what it is about is left out:
    those are the words of a library. `...`: some value of that kind."""
    if isinstance(wanted, dict):
        if "validation error" in str(wanted.get("message")):
            return bool(found["code"] == wanted["code"] and found["type"] == wanted["type"])
        return isinstance(found, dict) and all(
            name in found and _like(value, found[name]) for name, value in wanted.items()
        )
    if isinstance(wanted, list) and wanted and isinstance(wanted[0], dict):
        return isinstance(found, list) and all(
            _like(one, two) for one, two in zip(wanted, found, strict=True)
        )
    return wanted == "..." or bool(wanted == found)


@pytest.mark.parametrize("calls", list(_scenarios()))
async def test_as_recorded(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "model.safetensors").write_bytes(written(TINY))
    for name in ("lora_a", "lora_b"):
        adapter(tmp_path / name)
    options = {"memory_saver": False, "device": "cpu", **calls[0]["options"]}
    slots = {"slots": 2} if calls[0]["scenario"] == "adapters" else {}
    async with (
        running_sglang(model, model={**slots, **calls[0]["model"]}, **options) as sglang,
        httpx2.AsyncClient(base_url=sglang.url, trust_env=False, timeout=10) as http,
    ):
        sglang.model.members.add(29710)
        for call in calls:
            body = None if call["body"] is None else call["body"].replace("/srv", str(tmp_path))
            headers = {} if body is None else {"Content-Type": "application/json"}
            asking = http.request(
                call["method"], call["path"], content=body, headers={**headers, **call["headers"]}
            )
            if call["status"] is None:  # of which the server ended
                with pytest.raises(httpx2.TransportError):
                    await asking
                await until(lambda: sglang.model.dead)
                return
            response = await asking
            assert response.status_code == call["status"], call
            assert response.headers.get("content-type") == call["content_type"], call
            wanted = json.loads(json.dumps(call["answer"]).replace("/srv", str(tmp_path)))
            try:
                found = response.json()
            except ValueError:
                found = response.text
            assert _like(wanted, found), (call, found)
