"""The reference engine as real processes, broken and started again by its own fault hook."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from app.conformance.catalogue import catalogue
from app.devidp.issuer import DevIssuer
from app.reference_engine.tiny_adapter import write_tiny_adapter
from app.reference_engine.tiny_model import ensure_tiny_checkpoint
from tests.auth.conftest import Origin
from tests.conformance.test_command import chadburn
from tests.enginekit.client import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1_800)]

HOOK = Path(__file__).resolve().parents[2] / "scripts" / "break-engine"
ADMIN, INFERENCE = "engine-admin", "engine-inference"
WITHIN_S = 1_700.0  # of a busy machine; a quiet one takes a tenth
ESSENTIAL = (
    "pause.each-mode",
    "profiling.round",
    "release.*",
    "update.evidence",
    "update.is-what-answers",
    "update.*-wrong-shape",
    "session.answers",
    "rank.killed-during-an-update",
    "stream.*",
)
# Each of them starts the engine anew, which is what takes time.
OFTEN_RESTARTED = {
    "rank.killed-while-draining",
    "rank.killed-during-an-update",
    "rank.stopped",
    "rank.stopped-at-an-update",
    "rank.loss-is-told",
    "rank.recovers",
    "restart.fences",
    "restart.serves",
}


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [taken.getsockname()[1] for taken in sockets]
    for taken in sockets:
        taken.close()
    return ports


def hook(*words: str) -> None:
    subprocess.run([sys.executable, str(HOOK), *words], check=True, timeout=60)


@dataclass(frozen=True, slots=True)
class Tokens:
    """An issuer that is up, and what the engine has to be told of it."""

    issuer: DevIssuer
    stranger: DevIssuer

    @property
    def engine_words(self) -> tuple[str, ...]:
        return (
            *("--issuer", self.issuer.issuer),
            *("--admin-audience", ADMIN, "--inference-audience", INFERENCE),
        )

    def suite_words(self, folder: Path) -> tuple[str, ...]:
        """Each token in a file of its own."""
        refused = {
            "expired": self.mint(ADMIN, ttl_s=-3600),
            "elsewhere": self.mint("another-audience"),
            "stranger": self.mint(ADMIN, of=self.stranger),
        }
        words = []
        for name, token in refused.items():
            words += ["--refused-token", f"{name}={written(folder / name, token)}"]
        admin = written(folder / "admin", self.mint(ADMIN))
        inference = written(folder / "inference", self.mint(INFERENCE))
        return (*words, "--token-file", admin, "--inference-token-file", inference)

    def mint(self, audience: str, of: DevIssuer | None = None, **claims: Any) -> str:
        return (of or self.issuer).mint("gateway", "gateway", ["admin:pause"], audience, **claims)


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@asynccontextmanager
async def issuing() -> AsyncIterator[Tokens]:
    origin = Origin()
    await origin.start()
    issuer, stranger = (DevIssuer(origin.url, now=lambda: datetime.now(UTC)) for _ in range(2))
    origin.publish(issuer)
    try:
        yield Tokens(issuer, stranger)
    finally:
        await origin.stop()


@asynccontextmanager
async def served(folder: Path, ranks: int, *more: str) -> AsyncIterator[tuple[str, ...]]:
    """What the suite has to be told to find the engine, to break it, and to load weights."""
    weights = await asyncio.to_thread(ensure_tiny_checkpoint, folder / "weights", 1)
    adapter = folder / "adapters" / "tone"
    await asyncio.to_thread(write_tiny_adapter, weights, adapter)
    inference, admin = (f"127.0.0.1:{port}" for port in free_ports(2))
    state, ready = folder / "state", folder / "ready.json"
    options = {
        "--data-dir": str(folder / "data"),
        "--inference-address": inference,
        "--admin-address": admin,
        "--ready-file": str(ready),
        "--weights-root": str(weights.parent),
        "--lora-root": str(adapter.parent),
        "--rendezvous-allow": "127.0.0.1:9",
        "--tensor-parallel-size": str(ranks),
    }
    engine = (sys.executable, "-P", "-m", "app.cli", "engine", *more)
    words = [word for pair in options.items() for word in pair]
    await asyncio.to_thread(hook, str(state), "start", "--", *engine, *words)
    try:
        await until(ready.exists, within_s=600)
        yield (
            *(admin, "--inference", inference, "--destructive", "--strict", "--json"),
            *("--fault-hook", f"'{sys.executable}' '{HOOK}' '{state}'"),
            *("--weights", str(weights), "--scratch", str(weights.parent)),
            *("--shared-memory-prefix", "chadburn-", "--lora", str(adapter)),
        )
    finally:
        await asyncio.to_thread(hook, str(state), "stop")


def cases(ids: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for id_ in ids for word in ("--case", id_))


async def passes(*words: str) -> None:
    """With everything proven that the engine promises."""
    done = await chadburn(*words, within_s=WITHIN_S)
    report = json.loads(done.out)
    wrong = {
        case["id"]: case["reason"] or f"expected {case['expected']}; saw {case['seen']}"
        for case in report["cases"]
        if case["verdict"] == "fail" or case["id"] in report["not_proven"]
    }
    assert not wrong
    assert done.code == 0, done.err


async def test_with_one_rank_it_passes_and_nothing_that_it_offers_stays_unproven(
    tmp_path: Path,
) -> None:
    tried = tuple(case.id for case in catalogue() if case.id not in OFTEN_RESTARTED)
    async with issuing() as tokens, served(tmp_path, 1, *tokens.engine_words) as words:
        await passes(*words, *tokens.suite_words(tmp_path), *cases(tried))


async def test_with_two_ranks_it_passes_what_is_about_ranks(tmp_path: Path) -> None:
    async with served(tmp_path, 2, "--insecure-loopback") as words:
        await passes(*words, *cases(ESSENTIAL))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 4])
async def test_with_each_number_of_ranks_it_passes_everything(ranks: int, tmp_path: Path) -> None:
    async with (
        issuing() as tokens,
        served(tmp_path, ranks, *tokens.engine_words) as words,
    ):
        await passes(*words, *tokens.suite_words(tmp_path))
