"""docker-compose.yml and Dockerfile, as far as they can be judged without a container engine."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from app.cli import app
from app.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
VALUES = {
    "CHADBURN_ISSUER": "https://issuer.example",
    "CHADBURN_PUBLIC_URL": "https://chadburn.example",
    "CHADBURN_CHECKPOINT": "/srv/models/one",
}


def interpolated(text: str) -> str:
    """Compose's `${NAME:?…}`, `${NAME:-…}` and `${NAME}`, innermost first."""
    pattern = re.compile(r"\$\{(\w+)(?::([?-])([^${}]*))?\}")
    while found := pattern.search(text):
        name, kind, rest = found.groups()
        value = VALUES.get(name, rest if kind == "-" else None)
        assert value is not None, f"{name} has no value"
        text = text[: found.start()] + value + text[found.end() :]
    return text


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load(interpolated((ROOT / "docker-compose.yml").read_text()))


def test_the_gateway_understands_its_settings(
    compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VALUES:
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "chadburn.toml"
    config.write_text(compose["configs"]["gateway"]["content"])
    settings = load_settings(config)
    assert settings.public_url == VALUES["CHADBURN_PUBLIC_URL"]
    oauth = settings.engine_credentials["engine"].oauth
    assert oauth is not None
    assert oauth.token_url == "https://issuer.example/token"
    assert settings.engine_reach.allow_plaintext_beyond_loopback is False
    grace = compose["services"]["gateway"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > settings.shutdown_grace_s


@pytest.mark.parametrize("service", ["gateway", "engine"])
def test_the_command_knows_every_option(compose: Any, service: str) -> None:
    verb, *options = compose["services"][service]["command"]
    done = CliRunner().invoke(app, [verb, "--help"])
    assert done.exit_code == 0, done.output
    for option in options:
        assert re.search(rf"{option.partition('=')[0]}\b", done.output), f"{verb} {option}"


def test_secrets_come_as_files(compose: Any) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    declared = compose["secrets"]
    assert all(set(one) == {"file"} for one in declared.values())
    used = {name for one in compose["services"].values() for name in one.get("secrets", [])}
    assert used == set(declared)
    assert not re.search(r"(?mi)^ *\w*(password|secret): [^{]", text)
    assert "secrets/" in (ROOT / ".gitignore").read_text().splitlines()


@contextmanager
def running(*arguments: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """`chadburn …` as a process of its own, ended as a container engine would end it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", *arguments], cwd=ROOT,
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGTERM), said
    finally:
        process.kill()
        process.wait()


def becomes_well(healthcheck: list[str], process: subprocess.Popen[str], **instead: str) -> None:
    """Run a service's own check, with other addresses in it, until it passes."""
    kind, interpreter, flag, script = healthcheck
    assert (kind, interpreter, flag) == ("CMD", "python", "-c")
    for old, new in instead.items():
        assert old in script
        script = script.replace(old, new)
    ends = time.monotonic() + 120
    while True:
        assert process.poll() is None, process.communicate()[1]
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return
        assert time.monotonic() < ends, done.stderr
        time.sleep(0.2)


def test_the_engine_becomes_well(compose: Any) -> None:
    # Not below pytest's own folder: the path of a socket has to stay short.
    with tempfile.TemporaryDirectory(prefix="cb-", dir="/tmp") as folder:
        arguments = [
            "--data-dir=" + folder,
            "--insecure-loopback",
            f"--inference-address=unix:{folder}/inference.sock",
            f"--admin-address=unix:{folder}/admin.sock",
        ]
        check = compose["services"]["engine"]["healthcheck"]["test"]
        with running("engine", *arguments, environment={"OMP_NUM_THREADS": "1"}) as process:
            becomes_well(check, process, **{"/run/chadburn": folder})


def test_the_gateway_becomes_well(compose: Any, tmp_path: Path) -> None:
    """With its settings as they stand, but a database and a port of the test's own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    secret = tmp_path / "secret"
    secret.write_text("secret")
    content = compose["configs"]["gateway"]["content"]
    for old, new in {
        "/var/lib/chadburn": str(tmp_path),
        "0.0.0.0": "127.0.0.1",
        "8765": port,
        "/run/secrets/engine_client_secret": str(secret),
        "postgresql+psycopg://chadburn@postgres/chadburn?passfile=/run/secrets/pgpass": (
            f"sqlite+aiosqlite:///{tmp_path}/ledger.db"
        ),
    }.items():
        assert old in content
        content = content.replace(old, new)
    config = tmp_path / "chadburn.toml"
    config.write_text(content)
    check = compose["services"]["gateway"]["healthcheck"]["test"]
    with running("serve", f"--config={config}", environment={}) as process:
        becomes_well(check, process, **{"8765": port})


def test_the_images_run_without_rights_and_end_on_sigterm() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert "USER 10001" in lines
    assert "STOPSIGNAL SIGTERM" in lines
    stages = {line.split()[-1]: line.split()[1] for line in lines if line.startswith("FROM ")}
    assert (stages["gateway"], stages["engine"]) == ("base", "base")


def test_the_build_finds_what_it_copies() -> None:
    kept = set((ROOT / ".dockerignore").read_text().split())
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        words = line.split()
        if words[:1] != ["COPY"] or words[1].startswith("--from"):
            continue
        for source in words[1:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source.partition('/')[0]}" in kept, f"{source} is ignored by .dockerignore"
