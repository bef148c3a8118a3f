"""`chadburn sidecar`, up to where it would serve."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import grpc
import pytest

from app.cli import app
from app.commands.ending import CommandFailed
from app.rpc.openengine.v1 import admin_pb2, admin_pb2_grpc
from app.sidecars.tokens import StaticTokens
from tests.doubles.vllm_http import running_vllm
from tests.enginekit.client import refused, until
from tests.sidecars.checkpoints import checkpoint

TOKEN = "a-token-of-more-than-thirty-two-characters"


def _refusal(*words: str) -> str:
    with pytest.raises(CommandFailed) as failed:
        app(list(words), standalone_mode=False)
    assert failed.value.exit == 2
    return failed.value.line


def test_what_is_not_safe_is_not_served(tmp_path: Path) -> None:
    base = ("sidecar", "vllm", "--url", "http://127.0.0.1:1", "--data-dir", str(tmp_path / "d"))
    assert "--token-file" in _refusal(*base)
    short = tmp_path / "short"
    short.write_text("short")
    assert "32" in _refusal(*base, "--token-file", str(short))
    good = tmp_path / "token"
    good.write_text(TOKEN + "\n")
    both = (*base, "--token-file", str(good), "--issuer", "https://issuer.example")
    assert "not both" in _refusal(*both)
    open_to_all = ("--insecure-loopback", "--admin-address", "0.0.0.0:0")
    assert "loopback" in _refusal(*base, *open_to_all)
    plain = ("--token-file", str(good), "--admin-address", "0.0.0.0:0")
    assert "TLS" in _refusal(*base, *plain)
    for url in ("127.0.0.1:8000", "http://h:1/v1", "http://u@h:1", "ftp://h", "http://h:x"):
        words = ("sidecar", "vllm", "--url", url, "--data-dir", str(tmp_path))
        assert "--url" in _refusal(*words)
    key = tmp_path / "key"
    for text in ("", "two\nlines", "a b", "schl\N{LATIN SMALL LETTER U WITH DIAERESIS}ssel"):
        key.write_text(text)
        keyed = ("--insecure-loopback", "--engine-key-file", str(key))
        assert "holds no key" in _refusal(*base, *keyed)


@pytest.mark.anyio
async def test_tokens_from_files() -> None:
    from app.auth.principal import AudienceKind
    from app.auth.tokens.errors import TokenInvalid

    tokens = StaticTokens(admin=TOKEN, inference="i" + TOKEN)
    assert (await tokens.verify(TOKEN)).audience is AudienceKind.ADMIN
    inference = await tokens.verify("i" + TOKEN)
    assert inference.audience is AudienceKind.INFERENCE
    assert not inference.scopes
    for wrong in ("", TOKEN + "x", TOKEN[:-1]):
        with pytest.raises(TokenInvalid):
            await tokens.verify(wrong)


@pytest.mark.anyio
@pytest.mark.long
async def test_a_sidecar_as_a_process_that_asks_for_its_token(tmp_path: Path) -> None:
    ready, token = tmp_path / "ready", tmp_path / "token"
    token.write_text(TOKEN)
    async with running_vllm(checkpoint(tmp_path / "model", 1)) as vllm:
        words = ("sidecar", "vllm", "--url", vllm.url, "--data-dir", str(tmp_path / "data"))
        options = ("--admin-address", "127.0.0.1:0", "--inference-address", "127.0.0.1:0")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "app.cli", *words, *options),
            *("--token-file", str(token), "--ready-file", str(ready)),
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        try:
            await until(ready.exists, 60)
            said = json.loads(ready.read_text())
            assert said["engine"] == "vllm 0.32.0"
            async with grpc.aio.insecure_channel(said["admin_address"]) as channel:
                stub = admin_pb2_grpc.OpenEngineAdminStub(channel)
                request = admin_pb2.GetAdminProfileRequest()
                refusal = await refused(stub.GetAdminProfile(request))
                assert refusal.code is grpc.StatusCode.UNAUTHENTICATED
                bearer = (("authorization", f"Bearer {TOKEN}"),)
                profile = await stub.GetAdminProfile(request, metadata=bearer)
                assert profile.state.admission == admin_pb2.ADMISSION_STATE_OPEN
        finally:
            process.terminate()
            assert await process.wait() == 0
