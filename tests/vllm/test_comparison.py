"""Recorded requests, sent to the layer over real vLLM: by the sidecar and by the dialect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.driving import Gateway
from tests.http.compat.comparing import Compared
from tests.http.compat.comparison import REASONS, compared
from tests.real.beside import beside
from tests.real.gateway import ENGINE, gateway, register
from tests.real.servers import ROOT
from tests.vllm.servers import DATA, serving
from tests.vllm.test_harm import LAYER

pytestmark = pytest.mark.anyio

DOCUMENT = ROOT / "docs" / "vllm-comparison-real.md"
WRITTEN = DATA / DOCUMENT.name

NOT_OFFERED = "Not offered this way, so there is no such endpoint."
WHY: Mapping[str, str] = {
    "all": "This way can't end requests that are not named. Refused, where vLLM counts.",
    "unverified": "What ended can't be seen this way; `unverified` says so.",
    "front_end": "vLLM's front end 0.32.0 fails every load.",
    "asleep": "vLLM fails at it on a CPU; the sidecar sends a sleep and a wake-up of the rest.",
    "disk": "This engine has the backend `disk`, the recording's had none that takes files.",
}
SIDECAR: Mapping[str, str] = {"v.kvrelease": "asleep", "w.init.empty": "disk"}
DIALECT: Mapping[str, str] = {
    "abort.empty.none": "all",
    "abort.by.cmpl-id": "unverified",
    "l.ok": "front_end",
    "w.init.empty": "disk",
}


class Layer:
    def __init__(self, bridge: Gateway) -> None:
        self._bridge = bridge

    async def call(self, method: str, path: str, **how: Any) -> httpx2.Response:
        # Stopping a profile takes vLLM a minute and more.
        return await self._bridge.client.request(
            method, f"/compat/vllm/{ENGINE}{path}", timeout=600, **how
        )


async def rows_of(folder: Path, models: Path, admin: str, dialect: str) -> list[Compared]:
    def placed(sent: str) -> str:
        for there, here in (
            ("/models/tiny/", "a/"),
            ("/models/lora_a", "lora-one"),
            ("/models/lora_b", "lora-two"),
        ):
            sent = sent.replace(there, f"{models}/{here}")
        return sent

    with gateway(folder, LAYER) as bridge:
        async with bridge.client:
            await register(bridge, admin, dialect)
            layer = Layer(bridge)
            rows = await compared(layer, placed)
            # The recorded calls end where they may: whether it still generates is asked of it open.
            for path in ("/wake_up", "/resume"):
                await layer.call("POST", path)
            return rows


def why(row: Compared, of_the_way: Mapping[str, str]) -> str | None:
    """None: nothing says why this answer differs."""
    if not row.differs:
        return ""
    if row.status == 404 and row.recorded_status != 404:
        return NOT_OFFERED
    if row.name in of_the_way:
        return WHY[of_the_way[row.name]]
    return REASONS[row.reason] if row.reason is not None else None


async def test_nothing_differs_without_a_reason(models: Path, tmp_path: Path) -> None:
    for part in ("sidecar", "dialect"):
        (tmp_path / part).mkdir()
    with (
        serving(models / "a") as server,
        beside(server, tmp_path, models, "--sleep-unconfigured") as sidecar,
    ):
        by_sidecar = await rows_of(tmp_path / "sidecar", models, sidecar.admin, "openengine")
        assert server.is_alive()
    with serving(models / "a", rust=True) as server:
        by_dialect = await rows_of(tmp_path / "dialect", models, server.control, "vllm")
        assert server.is_alive()
    WRITTEN.write_text(document(by_sidecar, by_dialect))
    for rows, of_the_way in ((by_sidecar, SIDECAR), (by_dialect, DIALECT)):
        assert [row for row in rows if why(row, of_the_way) is None] == []
        assert {row.name for row in rows if row.differs} >= set(of_the_way)
    assert WRITTEN.read_text() == DOCUMENT.read_text(), f"what it came to now: {WRITTEN}"


def document(by_sidecar: list[Compared], by_dialect: list[Compared]) -> str:
    same = [sum(not row.differs for row in rows) for rows in (by_sidecar, by_dialect)]
    lines = [
        "# The endpoint layer over real vLLM 0.32.0",
        "",
        "Written by `tests/vllm/test_comparison.py`, which holds it to what is answered. The",
        "requests are those of [the comparison over a double](vllm-comparison.md), with answers",
        "recorded of vLLM's Python server; here they go to real vLLM on a CPU, once by the",
        "[sidecar](vllm-sidecar.md) (`--sleep-unconfigured`) and once by the",
        "[dialect](vllm-control.md). Compared are the status, the content type and the form of the",
        "body.",
        "",
        f"{len(by_sidecar)} requests. By the sidecar {same[0]} are answered alike, by the dialect",
        f"{same[1]}; all others differ for the reason that stands there.",
        "",
        "| request | vLLM | by the sidecar | by the dialect | why |",
        "|---|---|---|---|---|",
    ]
    for one, other in zip(by_sidecar, by_dialect, strict=True):
        reasons = dict.fromkeys((why(one, SIDECAR) or "", why(other, DIALECT) or ""))
        told = " ".join(reason for reason in reasons if reason)
        request = f"`{one.request}`".replace("|", "\\|")
        cells = (_cell(one), _cell(other), told)
        lines.append(f"| {request} | {one.recorded_status} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(row: Compared) -> str:
    parts = [part for part in row.differs if part != "status"]
    return f"{row.status} ({', '.join(parts)} differs)" if parts else str(row.status)
