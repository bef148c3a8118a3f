"""`chadburn db`: the schema is made, judged, and never changed by being looked at."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from app.ledger.schema import ReleaseSchema
from app.ledger.target import sole_process, target_of
from tests.cli.conftest import Run


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "gateway.toml"
    path.write_text(f'data_dir = "{tmp_path / "data"}"\n')
    return str(path)


def test_a_ledger_is_missing_then_made_then_current(run: Run, config: str, tmp_path: Path) -> None:
    missing = run("db", "check", "--config", config)
    assert missing.code == 6
    absent = f"there is no ledger at {tmp_path / 'data' / 'chadburn.db'} yet"
    assert missing.err == f"chadburn: {absent}: chadburn db upgrade\n"
    assert not (tmp_path / "data").exists()
    made = run("db", "upgrade", "--config", config)
    head = ReleaseSchema().head
    assert (made.code, made.out) == (0, f"schema none -> {head}\n")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    assert run("db", "upgrade", "--config", config).out == f"schema {head}: nothing to do\n"
    sound = "0 operations, 0 events, 0 keys, 0 leases: sound"
    assert run("db", "check", "--config", config).out == f"schema {head} is current\n{sound}\n"
    told = json.loads(run("db", "check", "--config", config, "--json").out)
    assert (told["schema"], told["sound"]) == ({"revision": head, "head": head}, True)
    pruned = run("db", "prune", "--config", config)
    assert pruned.out == "deleted 0 operations with 0 events, 0 keys, 0 audit entries\n"


def test_a_restored_ledger_gets_another_identity(run: Run, config: str, tmp_path: Path) -> None:
    def identity() -> str:
        with closing(sqlite3.connect(tmp_path / "data" / "chadburn.db")) as database:
            (found,) = database.execute("SELECT identity FROM ledger").fetchone()
        return str(found)

    run("db", "upgrade", "--config", config)
    head, before = ReleaseSchema().head, identity()
    told = run("db", "upgrade", "--restored", "--config", config)
    ended = "a new identity; 0 operations that were not sent yet have ended"
    assert (told.code, told.out) == (0, f"schema {head}: nothing to do\n{ended}\n")
    assert identity() != before
    told = run("db", "upgrade", "--restored", "--config", config, "--json")
    assert json.loads(told.out) == {"from": head, "to": head, "ended": 0}


@pytest.mark.parametrize("verb", [("check",), ("prune",), ("prune", "--dry-run")])
def test_what_is_only_looked_for_is_not_made(
    run: Run, config: str, tmp_path: Path, verb: tuple[str, ...]
) -> None:
    (tmp_path / "data").mkdir()
    missing = run("db", *verb, "--config", config)
    assert (missing.code, missing.out) == (6, "")
    absent = f"there is no ledger at {tmp_path / 'data' / 'chadburn.db'} yet"
    assert missing.err == f"chadburn: {absent}: chadburn db upgrade\n"
    assert os.listdir(tmp_path / "data") == []


@pytest.mark.parametrize("verb", ["upgrade", "check", "prune"])
def test_a_newer_schema_is_said_in_one_line(
    run: Run, config: str, tmp_path: Path, verb: str
) -> None:
    run("db", "upgrade", "--config", config)
    with closing(sqlite3.connect(tmp_path / "data" / "chadburn.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
        database.execute("UPDATE ledger SET compatible_from = '9999'")
    ahead = run("db", verb, "--config", config)
    assert (ahead.code, ahead.out) == (6, "")
    assert "(9999) is newer than this release" in ahead.err
    assert ahead.err.count("\n") == 1


def test_a_ledger_that_a_gateway_has_is_looked_at_and_not_written_to(
    run: Run, config: str, tmp_path: Path
) -> None:
    run("db", "upgrade", "--config", config)
    path = tmp_path / "data" / "chadburn.db"
    with sole_process(target_of(f"sqlite:///{path}")):
        for verb in ("upgrade", "prune"):
            busy = run("db", verb, "--config", config)
            assert (busy.code, busy.out) == (6, "")
            assert "another process has this SQLite ledger open" in busy.err
            assert busy.err.count("\n") == 1
        for arguments in (("check",), ("prune", "--dry-run")):
            assert run("db", *arguments, "--config", config).code == 0


def test_a_ledger_that_may_not_be_used_is_said_in_one_line(
    run: Run, config: str, tmp_path: Path, postgres_url: str
) -> None:
    run("db", "upgrade", "--config", config)
    path = tmp_path / "data" / "chadburn.db"
    away = {verb: refused_as_somebody_else(path, verb) for verb in ("upgrade", "check", "prune")}
    for verb, (code, said) in away.items():
        assert code == 7, (verb, said)
        assert "SQLite ledger" in said
        assert said.count("\n") == 1

    (tmp_path / "pg.toml").write_text(f'database_url = "{postgres_url}"\n')
    assert run("db", "upgrade", "--config", str(tmp_path / "pg.toml")).code == 0
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("CREATE ROLE stranger LOGIN")
    try:
        url = make_url(postgres_url).set(username="stranger").render_as_string()
        (tmp_path / "pg.toml").write_text(f'database_url = "{url}"\n')
        for verb in ("check", "prune"):
            ran = run("db", verb, "--config", str(tmp_path / "pg.toml"))
            assert ran.code == 7
            assert "does not permit" in ran.err
            assert ran.err.count("\n") == 1
    finally:
        with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute("DROP ROLE stranger")


def refused_as_somebody_else(path: Path, verb: str) -> tuple[int, str]:
    """`chadburn db VERB` as a user who may not write there: root is refused nothing, so it becomes
    another one, once everything is imported."""
    program = (
        "import os, sys\n"
        "import app.cli, app.commands.database, app.ledger\n"
        "import app.ledger.integrity, app.settings\n"
        "import aiosqlite, sqlalchemy.dialects.sqlite.aiosqlite\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.argv = ['chadburn', 'db', sys.argv[1]]\n"
        "app.cli.main()\n"
    )
    path.chmod(0o400)
    path.parent.chmod(0o555)
    ran = subprocess.run(
        [sys.executable, "-c", program, verb],
        env={**os.environ, "CHADBURN_DATABASE_URL": f"sqlite:///{path}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ran.returncode, ran.stderr


def test_what_is_wrong_in_a_ledger_is_found(run: Run, config: str, tmp_path: Path) -> None:
    run("db", "upgrade", "--config", config)
    with closing(sqlite3.connect(tmp_path / "data" / "chadburn.db")) as database, database:
        database.execute("UPDATE ledger SET pruned_to = 7")
    found = run("db", "check", "--config", config)
    assert found.code == 3
    assert "positions the order of events: places up to 7 are taken" in found.out
    assert found.err == "chadburn: the ledger is not sound: 1 findings\n"
    told = json.loads(run("db", "check", "--config", config, "--json").out)
    assert (told["sound"], [finding["check"] for finding in told["findings"]]) == (
        False,
        ["positions"],
    )


@pytest.mark.parametrize("age", ["30", "0d", "h", "1w", "-1d"])
def test_an_age_has_a_unit(run: Run, config: str, age: str) -> None:
    ran = run("db", "prune", "--config", config, f"--older-than={age}")
    assert ran.code == 2
    assert "30d" in ran.err


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
