"""What is said before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.scripted import Answer, Gateway, Seen, event, operation

UPDATE = ("update-weights", "torch-0", "--weight-version", "v8")
CONTINUE = ("continue-update", "torch-0", "--session", "s")
HANDING_OVER = ("engine", "--data-dir", "/nowhere", "--insecure-loopback")
DRAIN = ("pause", "torch-0", "--mode", "drain")
SUCCEEDED = event(9, "completed", 2, {"result": {"pause_epoch": 3}})


def accepted(seen: Seen) -> Answer:
    return Answer(202, operation())


class TestUsage:
    @pytest.mark.parametrize(
        "arguments",
        [
            ("pause", "torch-0"),
            ("pause", "torch-0", "--mode", "sleep"),
            ("pause", "a/b", "--mode", "drain"),
            ("pause", "..", "--mode", "drain"),
            ("abort", "torch-0"),
            ("abort", "torch-0", "r-1", "--all"),
            ("resume", "torch-0", "--pause-epoch", "0"),
            ("release", "torch-0", "--resource", "kv_cache", "--content", "discard"),
            ("release", "torch-0", "--content", "discard", "--drain", "wait"),
            ("restore", "torch-0", "--release-epoch", "0"),
            ("lora", "load", "torch-0", "sql"),
            ("profile", "start"),
            ("profile", "start", "torch-0", "--steps", "1", "--duration-ms", "1"),
            ("profile", "stop", "torch-0", ".."),
            ("profile", "download", "torch-0", "p"),
            ("reconfigure", "torch-0", "--drain", "wait"),
            ("reconfigure", "torch-0", "--role", "decode"),
            ("lora", "unload", "torch-0", "a/../b"),
            (*UPDATE, "--disk", "/m"),
            (*UPDATE, "--pause", "drain"),
            (*UPDATE, "--disk", "/m", "--source", "f", "--pause", "drain"),
            (*UPDATE, "--disk", "/m", "--pause", "drain", "--under-pause"),
            (*UPDATE, "--disk", "/m", "--pause", "drain", "--pause-epoch", "1"),
            (*UPDATE, "--disk", "/m", "--under-pause", "--new-requests", "hold"),
            (*UPDATE, "--source", "no-such-file", "--under-pause"),
            (*UPDATE, "--inline", "no-such-file", "--under-pause"),
            (*UPDATE, "--inline", __file__, "--under-pause"),
            (*UPDATE, "--inline", __file__, "--disk", "/m", "--under-pause"),
            CONTINUE,
            (*CONTINUE, "--commit", "1", "--abort"),
            (*CONTINUE, "--index", "0"),
            (*CONTINUE, "--file", "a.safetensors"),
            (*CONTINUE, "--chunk", __file__),
            (*CONTINUE, "--chunk", "no-such-file"),
            ("ops", "get", "../x"),
            ("engines", "register", "e", "--admin", "a:1", "--label", "x"),
            ("engines", "register", "e", "--admin", "a:1", "--admin", "b:1", "--control", "a:2"),
            (*HANDING_OVER, "--rendezvous-allow", "127.0.0.1"),
            (*HANDING_OVER, "--role", "unknown"),
            (*HANDING_OVER, "--role", "prefill", "--kv-address", "0.0.0.0:7003"),
            (*HANDING_OVER, "--role", "prefill", "--kv-address", "10.0.0.1:7003"),
            (*HANDING_OVER, "--role", "decode", "--kv-peer", "engine-1"),
            (*HANDING_OVER, "--role", "decode", "--kv-peer", "10.0.0.1"),
            ("no-such-verb",),
        ],
    )
    def test_senseless_calls_send_nothing(
        self, at: Run, gateway: Gateway, arguments: tuple[str, ...]
    ) -> None:
        ran = at(*arguments)
        assert ran.code == 2
        assert "Traceback" not in ran.err
        assert gateway.seen == []


class TestWhereTo:
    def test_a_running_demo_is_found(self, run: Run, gateway: Gateway, demo_dir: Path) -> None:
        gateway.then(accepted)
        assert run(*DRAIN).code == 0
        assert gateway.seen[0].headers["authorization"] == "Bearer demo-token"

    def test_flags_and_variables_come_first(
        self, run: Run, gateway: Gateway, demo_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gateway.then(accepted)
        monkeypatch.setenv("CHADBURN_TOKEN", "mine")
        assert run(*DRAIN, "--url", gateway.url + "/").code == 0
        assert gateway.seen[0].headers["authorization"] == "Bearer mine"

    def test_the_demos_token_goes_to_no_other_address(
        self, run: Run, gateway: Gateway, demo_dir: Path
    ) -> None:
        ran = run(*DRAIN, "--url", "http://127.0.0.1:1")
        assert (ran.code, gateway.seen) == (2, [])
        assert "give --token" in ran.err

    @pytest.mark.parametrize(
        ("arguments", "missing"),
        [
            ((), "--url and --token"),
            (("--url", "http://x"), "--token"),
            (("--token", "t"), "--url"),
        ],
    )
    def test_what_is_missing_is_named(
        self, run: Run, arguments: tuple[str, ...], missing: str
    ) -> None:
        ran = run(*DRAIN, *arguments)
        assert ran.code == 2
        assert f"give {missing};" in ran.err

    @pytest.mark.parametrize(
        "url",
        ["gateway:8765", "ftp://x", "localhost", "http://", "http://[::1", "http://x:99999"],
    )
    def test_an_address_is_an_address(self, run: Run, url: str) -> None:
        ran = run(*DRAIN, "--url", url, "--token", "t")
        assert ran.code in {2, 7}
        assert ran.err.count("\n") == 1

    @pytest.mark.parametrize("token", ["a b", "tökén", "a\nb", "a\x7f"])
    def test_a_token_that_is_none_goes_nowhere(
        self, run: Run, gateway: Gateway, token: str
    ) -> None:
        ran = run(*DRAIN, "--url", gateway.url, "--token", token)
        assert (ran.code, gateway.seen) == (2, [])
        assert token not in ran.err

    @pytest.mark.parametrize("key", ["", " ", "clé", "k" * 129])
    def test_a_key_that_is_none_goes_nowhere(self, at: Run, gateway: Gateway, key: str) -> None:
        ran = at(*DRAIN, "--key", key)
        assert (ran.code, gateway.seen) == (2, [])
        assert "--key: the idempotency key must be" in ran.err

    def test_a_damaged_ready_file_is_said(self, run: Run, demo_dir: Path) -> None:
        (demo_dir / "ready.json").write_text('{"base_url": 3}')
        ran = run(*DRAIN)
        assert ran.code == 2
        assert "ready.json" in ran.err
