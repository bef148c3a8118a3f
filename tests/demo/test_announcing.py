"""The demo's ready files: tokens in them never run out, and they go with the demo."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.demo.announcing import ReadyFiles, Running, announced
from app.demo.folder import Folder
from app.demo.plan import ADMIN_AUDIENCE, ENGINE_AUDIENCE, INFERENCE_AUDIENCE
from app.demo.tokens import ROLES, fetch_tokens
from app.devidp.running import DevIssuerSettings
from app.devidp.running import running as issuer_running

pytestmark = pytest.mark.anyio

SECRET = "s" * 32


@pytest.fixture
async def demo(tmp_path: Path) -> AsyncIterator[Running]:
    folder = Folder(tmp_path / "demo")
    folder.create()
    settings = DevIssuerSettings(
        secret=SECRET,
        admin_audience=ADMIN_AUDIENCE,
        inference_audience=INFERENCE_AUDIENCE,
        engine_audience=ENGINE_AUDIENCE,
    )
    async with issuer_running(settings) as issuer:
        yield Running(
            base_url="http://127.0.0.1:1",
            issuer=issuer.issuer,
            engine="demo",
            inference_address="127.0.0.1:2",
            admin_address="127.0.0.1:3",
            tokens=await fetch_tokens(issuer.issuer, SECRET),
            secret=SECRET,
            folder=folder,
        )


def read(path: Path) -> Any:
    return json.loads(path.read_text())


async def changed(path: Path, before: Any) -> Any:
    for _ in range(6000):
        if (found := read(path)) != before:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("it stays as it was")


async def test_tokens_are_renewed_in_every_place(demo: Running, tmp_path: Path) -> None:
    files = ReadyFiles(demo.folder, tmp_path / "asked-for.json")
    async with announced(demo, files, renew_s=0.05) as token_of:
        first = read(files.paths[0])
        assert set(first["tokens"]) == set(ROLES)
        second = await changed(tmp_path / "asked-for.json", first)
        assert second["tokens"]["operator"] != first["tokens"]["operator"]
        assert token_of("operator") != first["tokens"]["operator"]
        assert {**second, "tokens": None} == {**first, "tokens": None}
        header = demo.folder.operator_header.read_text()
        assert header.startswith("Authorization: Bearer ")
    assert not any(path.exists() for path in (*files.paths, demo.folder.operator_header))


async def test_a_renewal_that_fails_is_tried_again(demo: Running) -> None:
    files = ReadyFiles(demo.folder, None)
    wrong = replace(demo, issuer="http://127.0.0.1:1")
    async with announced(wrong, files, renew_s=0.01, retry_s=0.01) as token_of:
        await asyncio.sleep(0.2)
        assert token_of("operator") == demo.tokens["operator"]


async def test_what_a_killed_demo_left_is_not_taken_for_news(demo: Running, tmp_path: Path) -> None:
    files = ReadyFiles(demo.folder, tmp_path / "asked-for.json")
    for path in files.paths:
        path.write_text("{}")
    files.forget()
    assert not any(path.exists() for path in files.paths)


async def test_the_secrets_are_shown_by_nothing(demo: Running) -> None:
    assert SECRET not in repr(demo)
    assert not any(token in repr(demo) for token in demo.tokens.values())
