"""What is kept of logins: whole, for its user alone, one gateway's at a time."""

from __future__ import annotations

import json
import os
import pwd
import stat
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from app.commands.ending import CommandFailed, Exit
from app.commands.login.keeping import LOCK_S, Kept, Logins, Secret, user_folder
from tests.cli.conftest import Run
from tests.cli.scripted import Answer, Gateway, operation

GATEWAY = "https://gw.test"
DRAIN = ("pause", "torch-0", "--mode", "drain")
KEPT = Kept(
    gateway=GATEWAY,
    issuer="https://id.test",
    client_id="chadburn",
    parameters={"scope": "admin:read"},
    access_token="an-access-token",
    lifetime_s=600.0,
    expires_at=4e9,
    refresh_token="a-refresh-token",
)


@pytest.fixture
def logins(tmp_path: Path) -> Logins:
    return Logins(tmp_path / "config" / "chadburn")


def put(logins: Logins, kept: Kept = KEPT) -> Path:
    with logins.held(kept.gateway) as held, held.place() as place:
        place(kept)
    (file,) = logins.folder.glob("*.json")
    return file


def refusal(logins: Logins, gateway: str = GATEWAY) -> str:
    with pytest.raises(CommandFailed) as failed:
        logins.read(gateway)
    assert failed.value.exit is Exit.REFUSED
    assert "token" not in failed.value.line
    return failed.value.line


@pytest.mark.parametrize(
    "kept",
    [
        KEPT,
        replace(KEPT, refresh_token=None),
        replace(KEPT, secret=Secret(kind="file", value="/run/secret"), auth="client_secret_post"),
    ],
)
def test_it_is_read_as_it_was_kept(logins: Logins, kept: Kept) -> None:
    assert logins.read(GATEWAY) is None
    put(logins, kept)
    assert logins.read(GATEWAY) == kept
    assert logins.read("https://gw.test:8443") is None
    with logins.held(GATEWAY) as held:
        held.remove()
        held.remove()
    assert logins.read(GATEWAY) is None


def test_secrets_are_not_shown() -> None:
    shown = repr(replace(KEPT, secret=Secret(kind="kept", value="hidden")))
    for secret in ("an-access-token", "a-refresh-token", "hidden"):
        assert secret not in shown


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602, 0o610])
def test_a_file_that_others_may_use_is_not(logins: Logins, mode: int) -> None:
    file = put(logins)
    file.chmod(mode)
    assert f"chmod 600 {file}" in refusal(logins)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o711])
def test_a_folder_that_others_may_use_is_not(logins: Logins, mode: int) -> None:
    put(logins)
    logins.folder.chmod(mode)
    assert f"chmod 700 {logins.folder}" in refusal(logins)
    with pytest.raises(CommandFailed, match="chmod 700"):
        put(logins)


def test_what_belongs_to_another_user_is_not_used(
    logins: Logins, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(logins)
    monkeypatch.setattr(os, "geteuid", lambda: logins.folder.stat().st_uid + 1)
    assert "belongs to another user" in refusal(logins)
    with pytest.raises(CommandFailed, match="another user"):
        put(logins)


def test_nothing_is_followed_elsewhere(logins: Logins, tmp_path: Path) -> None:
    file = put(logins)
    moved = tmp_path / "moved"
    file.rename(moved)
    file.symlink_to(moved)
    assert "can't be read" in refusal(logins)
    file.unlink()
    os.mkfifo(file, 0o600)
    assert "is no file" in refusal(logins)
    folder = logins.folder.rename(tmp_path / "folder")
    logins.folder.symlink_to(folder)
    assert "can't be read" in refusal(logins)
    with pytest.raises(CommandFailed, match="can't be used"):
        put(logins)


def document(**changes: Any) -> str:
    return json.dumps({"version": 1, **asdict(KEPT), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 5_000,
        document(version=2),
        document(gateway="https://other.test"),
        document(surplus=1),
        document(access_token=7),
        document(access_token=None),
        document(refresh_token=[1]),
        document(expires_at="soon"),
        document(parameters=[]),
        document(parameters={"scope": 1}),
        document(secret={"kind": "file"}),
        document(secret="x"),
        "\x00",
    ],
)
def test_a_damaged_file_is_said_and_not_used(logins: Logins, text: str) -> None:
    put(logins).write_text(text)
    assert "is damaged: delete it" in refusal(logins)


def test_what_is_not_put_in_its_place_leaves_all_as_it_was(logins: Logins) -> None:
    file = put(logins)
    before = file.read_bytes()

    def interrupted() -> None:
        with logins.held(GATEWAY) as held, held.place():
            assert len(list(logins.folder.glob(".*"))) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert file.read_bytes() == before
    assert sorted(path.suffix for path in logins.folder.iterdir()) == [".json", ".lock"]


def test_what_a_killed_process_left_is_cleared_away(logins: Logins) -> None:
    file = put(logins)
    left = file.with_name(f".{file.name}.dead")
    left.write_text("half")
    other = file.with_name(".other.json.dead")
    other.write_text("another gateway's")
    put(logins)
    assert (left.exists(), other.exists()) == (False, True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_logout_leaves_nothing_of_a_login_that_was_killed(run: Run, logins: Logins) -> None:
    for kept in (False, True):
        file = put(logins)
        left = file.with_name(f".{file.name}.dead")
        left.write_text("a token")
        if not kept:
            file.unlink()
        run("logout", "--url", GATEWAY)  # its issuer is nowhere
        assert [path.suffix for path in logins.folder.iterdir()] == [".lock"]


def test_one_process_at_a_time_and_none_waits_for_ever(logins: Logins) -> None:
    slept: list[float] = []
    second = Logins(logins.folder, sleep=slept.append, clock=lambda: sum(slept))
    with logins.held(GATEWAY):
        with (
            pytest.raises(CommandFailed, match="does not finish") as failed,
            second.held(GATEWAY),
        ):
            raise AssertionError("it is held")
        with second.held("https://other.test"):
            pass
    assert failed.value.exit is Exit.UNREACHABLE
    assert LOCK_S < sum(slept) < LOCK_S + 1
    with second.held(GATEWAY):
        pass


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({"XDG_CONFIG_HOME": "/somewhere"}, "/somewhere/chadburn"),
        ({"XDG_CONFIG_HOME": "relative"}, "~/.config/chadburn"),
        ({"XDG_CONFIG_HOME": ""}, "~/.config/chadburn"),
        ({}, "~/.config/chadburn"),
    ],
)
def test_where_it_is_kept(variables: dict[str, str], where: str) -> None:
    assert user_folder(variables) == Path(where).expanduser()


def test_who_has_no_home_has_no_login(
    run: Run, gateway: Gateway, demo_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(_: int) -> Any:
        raise KeyError("no such user")

    gateway.then(Answer(202, operation()))
    for home in (None, "/dev/null"):
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        monkeypatch.delenv("HOME", raising=False)
        if home is not None:
            monkeypatch.setenv("HOME", home)
        monkeypatch.setattr(pwd, "getpwuid", nobody)
        assert run(*DRAIN).code == 0
    monkeypatch.delenv("HOME")
    ran = run("logout")
    assert (ran.code, "set HOME" in ran.err) == (2, True)


def test_a_login_counts_more_than_a_demo_and_less_than_what_is_given(
    run: Run, gateway: Gateway, demo_dir: Path, logins: Logins, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.then(Answer(202, operation()))
    put(logins, replace(KEPT, gateway=gateway.url))
    assert run(*DRAIN).code == 0
    assert run(*DRAIN, "--url", gateway.url).code == 0
    assert run("token").out == "an-access-token\n"
    assert run(*DRAIN, "--token", "given").code == 0
    monkeypatch.setenv("CHADBURN_TOKEN", "set")
    assert run(*DRAIN, "--url", gateway.url).code == 0
    shown = [seen.headers["authorization"].removeprefix("Bearer ") for seen in gateway.seen]
    assert shown == ["an-access-token", "an-access-token", "given", "set"]


def test_an_unsafe_login_stops_the_command_and_sends_nothing(
    run: Run, gateway: Gateway, logins: Logins
) -> None:
    put(logins, replace(KEPT, gateway=gateway.url)).chmod(0o644)
    for command in (DRAIN, ("token",), ("logout",)):
        ran = run(*command, "--url", gateway.url)
        assert (ran.code, ran.out, gateway.seen) == (6, "", [])
        assert "chmod 600" in ran.err
