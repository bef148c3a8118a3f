"""The double's system server answers what Dynamo's runtime answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.doubles.dynamo_http import running_worker
from tests.doubles.dynamo_model import Worker

pytestmark = pytest.mark.anyio

RECORDED = Path(__file__).parents[2] / "doubles" / "dynamo_recorded.jsonl"
CALLS = [json.loads(line) for line in RECORDED.read_text().splitlines()]


def judged(call: dict[str, Any], response: httpx2.Response) -> None:
    """Of JSON that is none, the words are a library's."""
    assert response.status_code == call["status"], call
    assert response.headers["content-type"] == call["type"], call
    if call["status"] == 400:
        assert response.json()["error"] == json.loads(call["answer"])["error"]
    else:
        assert response.text == call["answer"], call


async def test_as_recorded() -> None:
    async with (
        running_worker(Worker(odd=True)) as double,
        httpx2.AsyncClient(base_url=double.url, trust_env=False) as http,
    ):
        for call in CALLS:
            judged(call, await http.request(call["method"], call["path"], content=call["body"]))
