"""The dashboard's files as they are served, and what may be among them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from app.http.dashboard import dashboard_files
from tests.http.gateway import Gateway, gateway

pytestmark = pytest.mark.anyio

STATIC = Path(__file__).resolve().parents[2] / "static"
VENDOR = STATIC / "vendor"
HEAVIEST_BYTES = 300_000
LONGEST_LINES = 300


def test_libraries_are_what_was_published() -> None:
    manifest = json.loads((VENDOR / "vendor.json").read_text())
    named = {file["to"]: file for one in manifest["packages"] for file in one["files"]}
    assert {path.name for path in VENDOR.iterdir()} == {*named, "vendor.json"}
    for name, file in named.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == file["sha256"], name
    for one in manifest["packages"]:
        assert one["integrity"].startswith("sha512-")
        assert any(file["to"] == f"LICENSE.{one['package']}.txt" for file in one["files"])


def test_all_that_a_browser_loads_is_light() -> None:
    files = dashboard_files()
    shipped = {name: one for name, one in files.assets.items() if not name.endswith(".txt")}
    weight = len(files.shell) + sum(len(one.content) for one in shipped.values())
    assert weight < HEAVIEST_BYTES, weight


def test_own_modules() -> None:
    """They stay short, ask no other host for anything, and make no markup of text."""
    for path in sorted(STATIC.rglob("*.js")):
        text = path.read_text()
        assert text.count("\n") <= LONGEST_LINES, path
        for found in re.findall(r"https?://[^\s\"'`)]*", text):
            assert found == "http://www.w3.org/2000/svg", (path, found)
        for risk in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert risk not in text, (path, risk)
        for imported in re.findall(r"(?:from|import\()\s*\"([^\"]+)\"", text):
            assert (path.parent / imported).is_file(), (path, imported)


async def test_the_page(gate: Gateway) -> None:
    led = await gate.http.get("/ui")
    assert (led.status_code, led.headers["location"]) == (303, "/ui/")
    page = await gate.http.get("/ui/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["cache-control"] == "no-store"
    rules = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert rules["require-trusted-types-for"] == "'script'"
    assert not any("unsafe" in sources for sources in rules.values())
    assert not re.search(r"<script(?![^>]*src=)|<style|style=|\son\w+=", page.text)
    for address in ("/ui/engines/e1", "/ui/operations/x?state=failed", "/ui/nowhere/at/all"):
        deep = await gate.http.get(address)
        assert (deep.status_code, deep.text) == (200, page.text), address
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(named) > 10
    for path in named:
        assert path.startswith("/ui/assets/")
        assert (await gate.http.get(path)).status_code == 200, path
    assert not [path for path in named if "uplot" in path], "that is for pages with a chart"


async def test_its_files(gate: Gateway) -> None:
    folder = f"/ui/assets/{gate.rooms.dashboard.digest}"
    kinds = {
        "app.js": "text/javascript; charset=utf-8",
        "vendor/preact.mjs": "text/javascript; charset=utf-8",
        "style/base.css": "text/css; charset=utf-8",
        "mark.svg": "image/svg+xml",
        "vendor/LICENSE.htm.txt": "text/plain; charset=utf-8",
    }
    for name, kind in kinds.items():
        answer = await gate.http.get(f"{folder}/{name}")
        assert answer.headers["content-type"] == kind
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.content == (STATIC / name).read_bytes()
    for missing in (
        *(f"{folder}/{name}" for name in ("", "nothing.js", "index.html", "vendor/vendor.json")),
        f"{folder}/..%2Fpyproject.toml",
        f"{folder}/../../../pyproject.toml",
        "/ui/assets/0123456789abcdef/app.js",
    ):
        answer = await gate.http.get(missing)
        kind = answer.headers["content-type"]
        assert answer.status_code == 404 or kind.startswith("text/html"), missing


async def test_behind_a_proxy_with_a_path_of_its_own(tmp_path: Path) -> None:
    public = "https://chadburn.test/gw"
    settings: dict[str, Any] = {
        "public_url": public,
        "allowed_hosts": ("127.0.0.1",),
        "registered": False,
    }
    async with gateway(tmp_path / "data", **settings) as gate:
        at = f"http://127.0.0.1:{gate.port}"
        led = await gate.http.get(f"{at}/ui")
        assert led.headers["location"] == "/gw/ui/"
        page = await gate.http.get(f"{at}/ui/engines/e1")
        assert f'src="/gw/ui/assets/{gate.rooms.dashboard.digest}/app.js"' in page.text


async def test_what_a_token_may_do_is_told_with_how_the_gateway_is_set(tmp_path: Path) -> None:
    def policy(issuer: str) -> str:
        return (
            'require_reason = ["pause"]\n[[rules]]\nname = "all"\nscopes = "as_granted"\n'
            f'engines = "all"\nwho = {{ issuer = "{issuer}", subject = "ada" }}\n'
        )

    async with gateway(tmp_path / "data", read_only=True, registered=False) as gate:
        me = (await gate.get("/v1/me")).json()
        assert (me["read_only"], me["reason_required"]) == (True, [])
    async with gateway(tmp_path / "other", policy=policy) as gate:
        me = (await gate.get("/v1/me")).json()
        assert (me["read_only"], me["reason_required"]) == (False, ["pause"])


def test_without_its_files_there_is_none(tmp_path: Path) -> None:
    files = dashboard_files(tmp_path / "nothing")
    assert (files.shell, dict(files.assets)) == ("", {})
