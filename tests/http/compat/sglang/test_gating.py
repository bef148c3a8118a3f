"""Where the layer is off, or nothing is behind an endpoint, there is nothing at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.domain.kinds import OperationKind
from app.http.compat.sglang.table import SGLANG
from app.http.compat.vllm.table import VLLM
from app.main import create_app
from app.settings import CompatSettings, Settings
from tests.http.compat.layered import Layered, layered
from tests.http.compat.test_gating import answer
from tests.http.compat_callers import SECRET, known
from tests.http.full import FULL, full_engine
from tests.http.gateway import EVERYTHING, gateway

pytestmark = pytest.mark.anyio


def test_each_layer_is_there_by_itself() -> None:
    one = CompatSettings(layer="sglang", engines=(FULL,))
    two = CompatSettings(layer="vllm", engines=(FULL,))
    ways = ((), (one,), (two,), (two, one))
    off, *on = [len(create_app(Settings(compat=compat)).routes) for compat in ways]
    mine, other = len(SGLANG.rows), len(VLLM.rows)
    assert [routes - off for routes in on] == [mine, other, mine + other]


def test_a_flavour_goes_with_vllm() -> None:
    with pytest.raises(ValidationError):
        CompatSettings(layer="sglang", engines=(FULL,), flavour="0.32")


async def test_what_is_not_backed_is_not_there(sglang: Layered) -> None:
    gate = sglang.gate
    unknown = await answer(gate, "POST", "/compat/sglang/nobody/pause_generation")
    assert unknown[0] == 404
    there = f"/compat/sglang/{FULL}/pause_generation"
    assert (await gate.http.post(there)).status_code == 401
    engine = sglang.engine.offered
    sglang.engine.offered = replace(engine, operations=frozenset({OperationKind.RESUME}))
    await gate.rooms.fleet.discover(FULL)
    for path in ("pause_generation", "update_weights_from_disk", "flush_cache", "start_profile"):
        assert await answer(gate, "POST", f"/compat/sglang/{FULL}/{path}") == unknown
        auth = gate.auth()
        assert await answer(gate, "POST", f"/compat/sglang/{FULL}/{path}", **auth) == unknown
    # The other layer is off for it.
    assert await answer(gate, "POST", f"/compat/vllm/{FULL}/pause") == unknown


@pytest.mark.long
async def test_both_layers_of_one_engine(tmp_path: Path) -> None:
    compat = tuple({"layer": layer, "engines": (FULL,)} for layer in ("vllm", "sglang"))
    async with (
        gateway(tmp_path / "data", compat=compat) as gate,
        full_engine(gate, tmp_path / "full"),
    ):
        auth = gate.auth()
        for path, body in (
            ("vllm/full/pause?mode=keep", None),
            ("sglang/full/continue_generation", {}),
            ("sglang/full/pause_generation", {"mode": "in_place"}),
            ("vllm/full/resume", None),
        ):
            sent: dict[str, Any] = {} if body is None else {"json": body}
            done = await gate.http.post(f"/compat/{path}", headers=auth, **sent)
            assert done.status_code == 200, done.text


@pytest.mark.long
async def test_every_endpoint_takes_its_scopes(sglang: Layered) -> None:
    for row in SGLANG.rows:
        if not row.backed(sglang.engine.offered):
            continue
        path = row.path.replace("{method}", "x")
        url = f"/compat/sglang/{FULL}{path}"
        stranger = await sglang.gate.http.request(row.methods[0], url)
        assert (stranger.status_code, list(stranger.json())) == (401, ["error"]), row.path
        for scope in row.scopes:
            auth = sglang.gate.auth(*(one for one in EVERYTHING if one is not scope))
            lacking = await sglang.gate.http.request(row.methods[0], url, headers=auth)
            assert (lacking.status_code, list(lacking.json())) == (403, ["error"]), row.path
    assert await sglang.operations() == []


async def test_a_trainer_without_a_token(tmp_path: Path) -> None:
    """None of them sends one."""
    made = known(tmp_path, ("admin:read", "admin:pause"))
    async with layered(tmp_path, layer="sglang", compat_identity=made.settings) as sglang:
        base = f"/compat/sglang/{FULL}"
        done = await sglang.gate.http.post(f"{base}~{SECRET}/pause_generation", json={})
        assert done.status_code == 200, done.text
        (ordered,) = await sglang.operations()
        assert ordered["principal"]["issuer"] == "urn:chadburn:compat-identity"
        wrong = await sglang.gate.http.post(f"{base}~{'x' * 40}/pause_generation", json={})
        assert wrong.status_code == 404


ODD: tuple[Any, ...] = (
    None, True, -1, 10**40, 1.5, "", "\x00", "\ud800", "a\nb", "x" * 5000, [], [1], [[10**30]],
    {}, {"path": "\x00"}, ["\x00"], [None],
)  # fmt: skip
NAMES = (
    "mode", "tags", "rid", "abort_all", "model_path", "weight_version", "master_address",
    "master_port", "rank_offset", "world_size", "group_name", "backend", "names", "dtypes",
    "shapes", "selector", "new_version", "lora_name", "lora_path", "num_steps", "activities",
    "new_role", "new_ep_size", "load_format", "flush_cache",
)  # fmt: skip


@pytest.mark.long
async def test_nothing_that_can_be_sent_is_a_defect_here(sglang: Layered) -> None:
    headers = {"content-type": "application/json"}
    for row in SGLANG.rows:
        if not row.backed(sglang.engine.offered):
            continue
        for value in ODD:
            content = json.dumps(dict.fromkeys(NAMES, value)).encode()
            path = row.path.replace("{method}", "x")
            for query in ("", "?timeout=-1&dp_rank=%00", "?timeout=nan&format=%ff"):
                told = await sglang.call(
                    row.methods[-1], f"{path}{query}", content=content, headers=headers
                )
                assert told.status_code < 500 or path == "/ready", (row.path, value, told.text)
