"""Sockets and secret files as a gateway finds them, before anybody calls."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from app.auth.identities.known import UnixSocket
from app.http.listeners import SocketRefused, unix_socket
from app.settings import Settings, SettingsError, load_settings
from app.startup import StartupRefused, identities_of
from tests.backends.certificates import Authority

GOOD = "0123456789abcdef0123456789abcdef"


def own(path: Path) -> UnixSocket:
    return UnixSocket(path, os.geteuid())


def test_a_socket_is_for_its_user_alone_and_goes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with unix_socket(own(path)):
        assert path.stat().st_mode & 0o7777 == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


def test_one_that_was_left_behind_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with (
        unix_socket(own(path)),
        pytest.raises(SocketRefused, match="somebody listens"),
        unix_socket(own(path)),
    ):
        pass
    assert not path.exists()


def test_what_came_in_its_place_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with unix_socket(own(path)):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"
    with pytest.raises(SocketRefused, match="something else"), unix_socket(own(path)):
        pass


def test_a_folder_in_which_others_write_is_refused(tmp_path: Path) -> None:
    for mode, good in ((0o777, False), (0o770, False), (0o1777, True), (0o755, True)):
        tmp_path.chmod(mode)
        refused = pytest.raises(SocketRefused, match="others may write")
        with nullcontext() if good else refused, unix_socket(own(tmp_path / "s")):
            assert good, oct(mode)
    tmp_path.chmod(0o700)


def settings(tmp_path: Path, *identities: dict[str, Any]) -> Settings:
    common = {"name": "rl", "scopes": ["admin:read"], "engines": "all"}
    given = [{**common, **one} for one in identities]
    issuer = {"issuer": "https://i.test"}
    return load_settings(
        data_dir=tmp_path / "d", audience="a", issuers=[issuer], compat_identity=given
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"unix_socket": "/s", "secret_file": "/s"},
        {"secret_file": "/s", "uid": 1},
        {"unix_socket": "/s", "name": "Not A Name"},
        {"unix_socket": "/s", "scopes": []},
        {"unix_socket": "/s", "engines": "some"},
        {"tls": {"listen": "h:1", "certificate": "/", "key": "/", "client_ca": "/", "names": []}},
    ],
)
def test_settings_that_are_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="compat_identity"):
        settings(tmp_path, changes)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file"),
        ("", "takes 1 to 16 secrets"),
        ("\n".join(f"{GOOD}{n}" for n in range(17)), "takes 1 to 16 secrets"),
        (GOOD[:31], "a secret has 32"),
        ("a" * 64, "a secret has 32"),
        (f"{GOOD}\n{GOOD[:-1]}~", "a secret has 32"),
        (f"{GOOD}ü", "has other signs"),
        ("x" * 20_000, "takes 1 to 16 secrets"),
    ],
)
def test_secret_files_that_are_refused(tmp_path: Path, content: str | None, why: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StartupRefused) as refused:
        identities_of(settings(tmp_path, {"secret_file": file}))
    assert why in refused.value.line
    assert GOOD[:10] not in refused.value.line


def test_identities_that_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(GOOD)
    by_file = {"secret_file": file}
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue("localhost")
    tls = {
        "listen": "127.0.0.1:1",
        "certificate": certificate,
        "key": key,
        "client_ca": authority.path,
        "names": ["t.test"],
    }
    _, foreign = authority.issue("another.test")
    for identities, why in (
        ([by_file, by_file], "is there twice"),
        ([by_file, {**by_file, "name": "b"}], "the same secret"),
        ([{"unix_socket": "relative"}], "an absolute path"),
        ([{"unix_socket": "/" + "x" * 108}], "an absolute path of 107 bytes"),
        ([{"unix_socket": "/s"}, {"unix_socket": "/s", "name": "b"}], "another identity has it"),
        ([{**by_file, "scopes": ["admin:*"]}], "is no scope"),
        ([{**by_file, "engines": {"labels": {}}}], "engines.labels"),
        ([{**by_file, "engines": {"ids": ["e1"]}}], "unknown key"),
        ([{"tls": {**tls, "listen": "8443"}}], "host:port"),
        ([{"tls": {**tls, "key": foreign}}], "its files cannot be used"),
        ([{"tls": {**tls, "client_ca": key}}], "its files cannot be used"),
        ([{"tls": {**tls, "client_ca": "/nowhere"}}], "its files cannot be used"),
        ([{"tls": tls}, {"tls": tls, "name": "b"}], "another identity has it"),
    ):
        with pytest.raises(StartupRefused) as refused:
            identities_of(settings(tmp_path, *identities))
        assert refused.value.line.startswith("compat_identity '"), refused.value.line
        assert why in refused.value.line
    assert [one.way for one in identities_of(settings(tmp_path, {"tls": tls}))] == ["mtls"]
