"""`chadburn db`: the schema is made, judged, and never changed by being looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "gateway.toml"
    path.write_text(f'data_dir = "{tmp_path / "data"}"\n')
    return str(path)


def test_a_ledger_is_missing_then_made_then_current(run: Run, config: str, tmp_path: Path) -> None:
    missing = run("db", "check", "--config", config)
    assert missing.code == 6
    assert missing.err == "chadburn: there is no ledger there yet: chadburn db upgrade\n"
    assert not (tmp_path / "data").exists()
    made = run("db", "upgrade", "--config", config)
    assert (made.code, made.out.startswith("schema ")) == (0, True)
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    assert run("db", "upgrade", "--config", config).out == made.out
    assert run("db", "check", "--config", config).out == f"{made.out.strip()} is current\n"


def test_a_folder_that_is_named_for_the_database_is_not_made(run: Run, tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'mounted' / 'ledger.db'}"
    (tmp_path / "gateway.toml").write_text(f'database_url = "{url}"\n')
    assert run("db", "upgrade", "--config", str(tmp_path / "gateway.toml")).code == 7
    assert not (tmp_path / "mounted").exists()


def test_a_data_directory_that_cannot_be_made_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gateway.toml").write_text('data_dir = "/proc/nowhere"\n')
    ran = run("db", "upgrade", "--config", str(tmp_path / "gateway.toml"))
    assert ran.code == 7
    assert "/proc/nowhere" in ran.err


def test_a_misspelt_setting_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("databse_url = 'x'\n")
    ran = run("db", "check", "--config", str(tmp_path / "bad.toml"))
    assert ran.code == 2
    assert "databse_url" in ran.err
    assert ran.err.count("\n") == 1


def test_a_database_that_is_out_of_reach_is_no_refusal(run: Run, tmp_path: Path) -> None:
    url = "postgresql+psycopg://nobody@127.0.0.1:1/none?connect_timeout=2"
    (tmp_path / "far.toml").write_text(f'database_url = "{url}"\n')
    ran = run("db", "check", "--config", str(tmp_path / "far.toml"))
    assert ran.code == 7
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["serve", "engine"])
def test_servers_say_what_is_missing(run: Run, verb: str, tmp_path: Path) -> None:
    arguments = ["--data-dir", str(tmp_path / "e")] if verb == "engine" else ["--port", "0"]
    ran = run(verb, *arguments)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "issuer" in ran.err


def test_the_development_issuer_serves_loopback_with_a_good_secret_only(
    run: Run, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("short")
    ran = run(
        "dev-issuer", "--secret-file", str(secret), "--data-dir", str(tmp_path / "i"),
        "--ready-file", str(tmp_path / "ready.json"),
    )  # fmt: skip
    assert ran.code == 1
    assert "secret" in ran.err
    assert not (tmp_path / "ready.json").exists()
