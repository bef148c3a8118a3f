"""docker-compose.yml and Dockerfile, as far as they can be judged without a container engine."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("service", ["postgres", "engine", "gateway"])
def test_every_service_says_whether_it_is_well(compose: Any, service: str) -> None:
    test = compose["services"][service]["healthcheck"]["test"]
    assert test[0] == "CMD"
    if test[1] == "python":
        compile(test[-1], service, "exec")


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
