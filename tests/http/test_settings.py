"""Settings: where they come from, and that nothing misspelt is ignored."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from app.discovery_settings import DiscoverySettings, KubernetesSettings
from app.domain.kinds import OperationKind
from app.domain.scopes import Scope
from app.settings import (
    BrowserSessionSettings,
    IssuerSettings,
    LoginSettings,
    ReachSettings,
    Settings,
    SettingsError,
    load_settings,
)
from app.startup import (
    StartupRefused,
    credentials_of,
    deadlines_of,
    issuers_of,
    logins_of,
    reach_of,
)

SECRET = "hunter2-secret"


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:

    for name in os.environ:
        if name.startswith("CHADBURN_"):
            monkeypatch.delenv(name)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "chadburn.toml"
    path.write_text(text)
    return path


def test_arguments_stand_above_the_environment_and_that_above_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(
        tmp_path,
        """
        port = 1
        host = "localhost"
        log_level = "debug"
        [engine_reach]
        hosts = ["engine.example"]
        cidrs = ["10.0.0.0/8"]
        [operation_deadline_ms]
        pause = 5000
        """,
    )
    monkeypatch.setenv("CHADBURN_PORT", "2")
    monkeypatch.setenv("CHADBURN_HOST", "127.0.0.1")
    monkeypatch.setenv("CHADBURN_ENGINE_REACH__CIDRS", '["192.168.0.0/16"]')
    settings = load_settings(config, port=3)
    assert (settings.port, settings.host, settings.log_level) == (3, "127.0.0.1", "debug")
    assert settings.engine_reach.hosts == ("engine.example",)
    assert settings.engine_reach.cidrs == ("192.168.0.0/16",)
    assert settings.operation_deadline_ms == {OperationKind.PAUSE: 5000}


def test_the_file_may_be_named_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHADBURN_CONFIG", str(written(tmp_path, "port = 7")))
    assert load_settings().port == 7


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("prot = 1", "unknown setting 'prot' in"),
        ('[[issuers]]\nissuer = "https://i"\naudiance = "x"', "setting 'issuers.0.audiance'"),
        ("port = 70000", "port: "),
        (f'port = "{SECRET}"', "port: "),
        (f'public_url = "ftp://{SECRET}"', "public_url: "),
        (f'public_url = "https://user:{SECRET}@host"', "public_url: "),
        ('host = "0.0.0.0"', "public_url is needed"),
        ("key_retention_hours = 1", "key_retention_hours: "),
        ("port = ", "is not valid TOML"),
        ('[engine_credentials.a]\nbearer_file = "x"\n[engine_credentials.a.oauth]\n'
         'token_url = "https://i/t"\nclient_id = "c"\nclient_secret_file = "s"', "exclude each"),
        ("[engine_credentials.a]", "names no token"),
        ('[operation_deadline_ms]\nsing = 3', "operation_deadline_ms"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line_without_the_value(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(written(tmp_path, text))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
    assert SECRET not in str(refused.value)


def test_mistakes_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, line in (
        ("CHADBURN_PROT", "1", "CHADBURN_PROT"),
        ("CHADBURN_ISSUERS", SECRET, "issuers"),
    ):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            with pytest.raises(SettingsError, match=line) as refused:
                load_settings()
        assert SECRET not in str(refused.value)
    with pytest.raises(SettingsError, match="cannot read"):
        load_settings(Path("/nowhere/chadburn.toml"))
    # Of other commands of the same program.
    for name in ("CHADBURN_TOKEN", "CHADBURN_CLIENT_ID", "CHADBURN_CLIENT_SECRET"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("CHADBURN_DEMO__DIR", "x")
    load_settings()


def test_settings_are_frozen_and_do_not_show_the_database_password() -> None:
    settings = Settings(database_url=f"postgresql://u:{SECRET}@h/d")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1
    assert SECRET not in repr(settings)
    assert SECRET in settings.ledger_url


def test_where_the_ledger_is_by_itself(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert settings.ledger_url == f"sqlite+aiosqlite:///{tmp_path}/chadburn.db"


@pytest.mark.parametrize(
    ("changes", "url"),
    [
        ({}, "http://127.0.0.1:8765"),
        ({"host": "::1", "port": 1}, "http://[::1]:1"),
        ({"public_url": "https://gw.example/chadburn/"}, "https://gw.example/chadburn"),
    ],
)
def test_where_callers_find_it(changes: dict[str, Any], url: str) -> None:
    assert Settings(**changes).base_url == url


def test_what_is_not_safe_to_start_with() -> None:
    issuer = {"issuer": "https://issuer.example"}
    asks = {"client_id": "c", "client_secret_file": "/nowhere/secret"}
    for changes, line in (
        ({}, "no token issuer"),
        ({"issuers": (issuer,)}, "no audience"),
        ({"issuers": (issuer,), "audience": "a", "engine_reach": {}}, None),
        (
            {"issuers": ({**issuer, "inference_audiences": ("a",)},), "audience": "a"},
            "inference_audiences",
        ),
        ({"issuers": ({**issuer, "algorithms": ("HS256",)},), "audience": "a"}, "algorithms"),
        (
            {"issuers": ({**issuer, "introspection": asks},), "audience": "a"},
            "introspection.client_secret_file: cannot be read",
        ),
    ):
        settings = Settings(**changes)
        if line is None:
            assert issuers_of(settings)[0].audience == "a"
            continue
        with pytest.raises(StartupRefused, match=line) as refused:
            issuers_of(settings)
        assert refused.value.exit_code == 2
    with pytest.raises(StartupRefused, match="engine_reach"):
        reach_of(Settings(engine_reach={"cidrs": ("nonsense",)}))  # type: ignore[arg-type]
    with pytest.raises(StartupRefused, match="operation_deadline_ms"):
        deadlines_of(Settings(operation_deadline_ms={OperationKind.RESUME: 86_400_000}))


def test_settings_become_the_values_of_the_rooms(tmp_path: Path) -> None:
    settings = load_settings(
        written(
            tmp_path,
            """
            audience = "urn:gateway"
            [[issuers]]
            issuer = "https://issuer.example"
            inference_audiences = ["urn:inference"]
            profile = "compatible"
            [[issuers.role_maps]]
            claim = "realm_access.roles"
            scopes = {operator = ["admin:pause", "admin:read"]}
            [engine_credentials.main]
            bearer_file = "/run/token"
            bound_to = ["engine.example"]
            [engine_credentials.main.tls]
            authorities = "/run/ca.pem"
            """,
        )
    )
    (issuer,) = issuers_of(settings)
    assert (issuer.audience, issuer.profile) == ("urn:gateway", "compatible")
    assert issuer.role_maps[0].scopes["operator"] == {Scope.PAUSE, Scope.READ}
    credential = credentials_of(settings)["main"]
    assert credential.bearer_file == Path("/run/token")
    assert credential.tls is not None
    assert credential.bound_to == ("engine.example",)
    assert reach_of(Settings()).hosts == ("localhost",)


def test_every_setting_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    sections = (
        *(Settings, IssuerSettings, ReachSettings, LoginSettings, BrowserSessionSettings),
        *(DiscoverySettings, KubernetesSettings),
    )
    for name in [name for section in sections for name in section.model_fields]:
        assert f"`{name}`" in text, name


def test_what_login_is_not_started_with(tmp_path: Path) -> None:
    def file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    key = base64.b64encode(bytes(range(32))).decode()
    keys = {"key_files": (file("key", key),)}
    login: dict[str, Any] = {"client_id": "c"}
    issuer = {"issuer": "https://issuer.example", "audience": "a"}
    cases: tuple[tuple[dict[str, Any], str | None], ...] = (
        ({}, None),
        ({"login": {**login, "client_secret_file": file("secret", SECRET)}}, None),
        ({"public_url": "http://127.0.0.1:80"}, None),
        ({"public_url": "http://gateway.example"}, "https public_url"),
        ({"browser_sessions": {}}, "key_files"),
        ({"browser_sessions": {"key_files": (tmp_path / "none",)}}, "cannot be read"),
        ({"browser_sessions": {"key_files": (file("short", "c2hvcnQ="),)}}, "32 bytes"),
        ({"browser_sessions": {"key_files": (file("odd", SECRET + "!"),)}}, "not base64"),
        ({"browser_sessions": {"key_files": (*keys["key_files"],) * 2}}, "twice"),
        ({"login": {**login, "client_secret_file": tmp_path / "none"}}, "cannot be read"),
        ({"login": {**login, "client_auth": "basic"}}, "client_auth"),
        ({"login": {**login, "name": "A B"}}, "login.name"),
        ({"login": {**login, "client_id": ""}}, "login.client_id"),
        ({"login": {**login, "parameters": {"state": "x"}}}, "'state' is not for settings"),
        ({"issuer": {"dpop": "required"}}, "dpop is required"),
        (
            {
                "login": {
                    **login,
                    "client_auth": "private_key_jwt",
                    "client_secret_file": file("pem", SECRET),
                }
            },
            "is no key for RS256",
        ),
    )
    for changes, line in cases:
        given = {**issuer, "login": changes.pop("login", login), **changes.pop("issuer", {})}
        settings = Settings(
            **{
                "issuers": (given,),
                "public_url": "https://gateway.example",
                "browser_sessions": keys,
                **changes,
            }
        )
        if line is None:
            setup = logins_of(settings, issuers_of(settings))
            assert setup is not None
            assert [client.name for client in setup.clients] == ["issuer-example"]
            continue
        with pytest.raises(StartupRefused, match=line) as refused:
            logins_of(settings, issuers_of(settings))
        assert refused.value.exit_code == 2
        assert SECRET not in str(refused.value)
    two = (
        {**issuer, "login": {**login, "name": "x"}},
        {**issuer, "issuer": "https://b.example", "login": {**login, "name": "x"}},
    )
    settings = Settings(issuers=two, public_url="https://g.example", browser_sessions=keys)  # type: ignore[arg-type]
    with pytest.raises(StartupRefused, match="twice"):
        logins_of(settings, issuers_of(settings))
    assert logins_of(Settings(), ()) is None
