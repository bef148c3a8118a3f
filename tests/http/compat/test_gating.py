"""Where the layer is off, or nothing is behind an endpoint, there is nothing at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.domain.selectors import Selector
from app.edges import exposures_of
from app.http.compat.exposures import Exposure, Exposures, Flavour, Layer
from app.http.compat.vllm.table import VLLM
from app.main import create_app
from app.settings import CompatSettings, Settings
from tests.http.compat.layered import Layered
from tests.http.full import FULL
from tests.http.gateway import ENGINE_ID, Gateway, gateway

pytestmark = pytest.mark.anyio

ON = CompatSettings(layer="vllm", engines=(FULL,))
VARYING = ("x-request-id", "date", "content-length")


async def answer(gate: Gateway, method: str, path: str, **headers: str) -> tuple[Any, ...]:
    """All of it but what no two answers have in common."""
    given = await gate.http.request(method, path, headers=headers)
    told = {name: value for name, value in given.headers.items() if name not in VARYING}
    body = given.json() if given.content else {}
    for name in ("instance", "request_id", "trace_id"):
        body.pop(name, None)
    return given.status_code, told, body


async def test_other_routes_are_the_same_with_and_without_it(tmp_path: Path) -> None:
    on, off = create_app(Settings(compat=(ON,))), create_app(Settings())
    assert on.openapi() == off.openapi()
    assert len(on.routes) == len(off.routes) + len(VLLM.rows)
    async with (
        gateway(tmp_path / "on", compat=(ON,)) as with_it,
        gateway(tmp_path / "off") as without,
    ):
        for method, path in (
            ("GET", "/v1/engines"),
            ("POST", f"/v1/engines/{ENGINE_ID}/pause"),
            ("GET", "/nothing"),
            ("DELETE", "/healthz"),
            ("POST", f"/compat/vllm/{ENGINE_ID}/pause"),
            ("GET", f"/compat/vllm/{ENGINE_ID}/pause"),
            ("HEAD", f"/compat/vllm/{ENGINE_ID}/health"),
            ("POST", f"/compat/vllm/{FULL}/pause"),
            ("POST", "/compat/vllm/~/pause"),
        ):
            mine, other = await answer(with_it, method, path), await answer(without, method, path)
            # What names its own address.
            mine[1].pop("www-authenticate", None), other[1].pop("www-authenticate", None)
            assert mine == other, (method, path)
            assert mine[0] == 404 or not path.startswith("/compat")


async def test_an_endpoint_is_there_when_the_engine_has_something_behind_it(
    vllm: Layered,
) -> None:
    gate = vllm.gate
    unknown = await answer(gate, "POST", "/compat/vllm/nobody/pause")
    assert unknown[0] == 404
    # No such order: as unknown as the engine that is not there, to a stranger and to everybody.
    missing = f"/compat/vllm/{FULL}/update_weight_version"
    assert await answer(gate, "POST", missing) == unknown
    assert await answer(gate, "POST", missing, **gate.auth()) == unknown
    assert await answer(gate, "GET", missing) == unknown
    there = await gate.http.post(f"/compat/vllm/{FULL}/pause")
    assert there.status_code == 401
    wrong = await gate.http.get(f"/compat/vllm/{FULL}/pause")
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})
    assert wrong.headers["allow"] == "POST"


@pytest.mark.long
async def test_labels_say_which_engines(tmp_path: Path) -> None:
    by_label = {"layer": "vllm", "labels": {"pool": "rl"}}
    async with gateway(tmp_path, registered=False, compat=(by_label,)) as gate:
        await gate.register(ENGINE_ID, labels={"pool": "rl"})
        await gate.register("e2", labels={"pool": "chat"})
        for engine in (ENGINE_ID, "e2"):
            await gate.rooms.fleet.discover(engine)
        found = [
            (await gate.http.post(f"/compat/vllm/{one}/pause")).status_code
            for one in (ENGINE_ID, "e2")
        ]
        assert found == [401, 404]


def test_the_first_that_takes_an_engine_counts() -> None:
    settings = Settings(
        compat=(
            CompatSettings(layer="vllm", engines=("a",), flavour="0.32"),
            CompatSettings(layer="vllm", labels={"pool": ("rl", "eval")}),
        )
    )
    found = exposures_of(settings)
    assert found.flavour_of(Layer.VLLM, "a", {"pool": "rl"}) is Flavour.V0_32
    assert found.flavour_of(Layer.VLLM, "b", {"pool": "eval"}) is Flavour.V0_26
    assert found.flavour_of(Layer.VLLM, "b", {}) is None
    assert found.may_take(Layer.VLLM, "b")
    assert not Exposures((Exposure(Selector(ids=frozenset({"a"}))),)).may_take(Layer.VLLM, "b")


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"layer": "vllm"},
        {"layer": "other", "engines": ["a"]},
        {"layer": "vllm", "engines": ["A b"]},
        {"layer": "vllm", "labels": {"": "x"}},
        {"layer": "vllm", "labels": {"pool": []}},
        {"layer": "vllm", "labels": "pool"},
        {"layer": "vllm", "engines": ["a"], "flavour": "0.27"},
        {"layer": "vllm", "engines": ["a"], "more": 1},
    ],
)
def test_settings_that_say_nothing_clear_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CompatSettings(**wrong)
