from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

import app.cli
from tests.cli.scripted import Gateway, scripted


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with scripted() as running:
        yield running


@pytest.fixture(scope="session")
def built() -> Callable[[], Any]:
    """The command with all its verbs, as typer makes it of them at every start: it takes longer
    than most of what is tried here, and comes out the same."""
    return typer.main.get_command(app.cli.app)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    built: Callable[[], Any],
) -> Run:
    """`chadburn ARGUMENTS` in an empty folder, without settings from around it."""
    monkeypatch.setattr(app.cli, "app", built)
    monkeypatch.chdir(tmp_path)
    for name in ("URL", "TOKEN", "CONFIG", "CLIENT_ID", "CLIENT_SECRET"):
        monkeypatch.delenv(f"CHADBURN_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["chadburn", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.cli.main()
        out, err = capsys.readouterr()
        return Ran(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture
def at(run: Run, gateway: Gateway) -> Run:
    """The same against the scripted gateway."""
    return lambda *arguments: run(*arguments, "--url", gateway.url, "--token", "t0k3n")


@pytest.fixture
def demo_dir(tmp_path: Path, gateway: Gateway) -> Path:
    """What a running demo leaves for the other commands, with the scripted gateway in it."""
    folder = tmp_path / ".data" / "demo"
    folder.mkdir(parents=True)
    ready = {
        "base_url": gateway.url,
        "issuer": "http://127.0.0.1:9",
        "engine": "torch-0",
        "inference_address": "127.0.0.1:9",
        "admin_address": "127.0.0.1:9",
        "tokens": {"operator": "demo-token", "inference": "demo-inference"},
        "data_dir": str(folder),
    }
    (folder / "ready.json").write_text(json.dumps(ready))
    return folder
