"""Recorded requests, sent to the layer over real SGLang and its sidecar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.driving import Gateway
from tests.http.compat.comparing import Compared, table
from tests.http.compat.sglang.comparison import REASONS, compared
from tests.real.beside import beside
from tests.real.gateway import ENGINE, gateway, register
from tests.real.servers import ROOT
from tests.reference_engine.trainers import GROUP, Trainer, trainer
from tests.sglang.conftest import LAYER
from tests.sglang.servers import DATA, options, serving
from tests.sglang.tensors import tensors_of

pytestmark = pytest.mark.anyio

DOCUMENT = ROOT / "docs" / "sglang-comparison-real.md"
WRITTEN = DATA / DOCUMENT.name

# What is otherwise than over the double of an engine. None: alike here.
OWN_REASONS: Mapping[str, str] = {
    "not_offered": "This engine was not started for it, so there is no such endpoint.",
    "missing": "SGLang keeps what it had of the tensors that are missing, and says that all went "
    "well. Refused.",
}
OWN: Mapping[str, str | None] = {
    "uwd missing_tensors": "missing",
    # The pause that the update made for itself was lifted in between.
    "end twice": None,
    "pd_role_switch": "not_offered",
    "scale_elastic_ep": "not_offered",
    "is_scaling_elastic_ep": "not_offered",
    "scale_elastic_ep bad": "not_offered",
}


class Layer:
    def __init__(self, bridge: Gateway) -> None:
        self._bridge = bridge

    async def call(self, method: str, path: str, **how: Any) -> httpx2.Response:
        # Stopping a profile may take SGLang a minute.
        return await self._bridge.client.request(
            method, f"/compat/sglang/{ENGINE}{path}", timeout=600, **how
        )


async def rows_of(folder: Path, models: Path, admin: str) -> list[Compared]:
    tensors = tensors_of(models / "b")

    def act(member: Trainer) -> None:
        one, other = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
        member.send(tensors[one])
        member.send(tensors[one], tensors[other])
        member.stay()

    with gateway(folder, LAYER) as bridge, trainer(1, act) as sender:

        def placed(sent: str) -> str:
            for there, here in (
                ("/srv/sglang/tiny", f"{models}/a"),
                ("/srv/sglang/lora_a", f"{models}/lora-one"),
                ("/srv/scratch/models/same_shape", f"{models}/b"),
                ("/srv/scratch/models/missing_tensors", f"{models}/b-without-one"),
                ("29710", str(sender.port)),
                ('"g1"', f'"{GROUP}"'),
            ):
                sent = sent.replace(there, here)
            return sent

        async with bridge.client:
            await register(bridge, admin, "openengine")
            layer = Layer(bridge)
            rows = await compared(layer, placed)
            # The recorded calls end where they may: whether it still generates is asked of it open.
            for path in ("/resume_memory_occupation", "/continue_generation"):
                await layer.call("POST", path, json={})
            return rows


def why(row: Compared) -> str | None:
    """The key of a reason; None: alike, or nothing says why not."""
    return OWN.get(row.name, row.reason)


async def test_nothing_differs_without_a_reason(models: Path, tmp_path: Path) -> None:
    with (
        serving(models / "a", lora=True) as server,
        beside(server, tmp_path, models, *options(tmp_path)) as sidecar,
    ):
        (tmp_path / "gateway").mkdir()
        rows = await rows_of(tmp_path / "gateway", models, sidecar.admin)
        assert server.is_alive()
    WRITTEN.write_text(document(rows))
    assert [row for row in rows if bool(row.differs) != (why(row) is not None)] == []
    assert WRITTEN.read_text() == DOCUMENT.read_text(), f"what it came to now: {WRITTEN}"


def document(rows: list[Compared]) -> str:
    reasons = {**REASONS, **OWN_REASONS}
    told = [replace(row, reason=why(row)) for row in rows]
    lines = [
        "# The endpoint layer over real SGLang 0.5.23",
        "",
        "Written by `tests/sglang/test_comparison.py`, which holds it to what is answered. The",
        "requests are those of [the comparison over a double](sglang-comparison.md), with answers",
        "recorded of SGLang itself; here they go to real SGLang on a CPU, by the",
        "[sidecar](sglang-sidecar.md) (`--release-unconfigured`). Compared are the status, the",
        "content type and the form of the body. `it ended`: SGLang did, over that request; here it",
        "generates after all of them.",
        "",
    ]
    return "\n".join([*lines, *table(told, "SGLang", reasons)])
