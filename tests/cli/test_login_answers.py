"""Gateways and issuers that say something wrong: one line, a code, and nothing kept."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.commands.ending import CommandFailed, Exit
from app.commands.http import Gateway as Calls
from app.commands.login.asking import AskedAs
from app.commands.login.device import Begun, wait
from app.commands.login.metadata import IssuerEndpoints, Protected
from app.commands.logins import login
from app.commands.target import Target
from tests.backends.certificates import Authority
from tests.cli.conftest import Ran, Run
from tests.cli.scripted import Answer, Gateway, Json, Seen, scripted

RESOURCE = "/.well-known/oauth-protected-resource"
METADATA = "/.well-known/openid-configuration"
ESCAPE = "\x1b[2J"


class House:
    """A gateway and its issuer at one address. All is right but what a test changes."""

    def __init__(self, gateway: Gateway) -> None:
        at = gateway.url
        self.answers: dict[str, Answer] = {
            RESOURCE: Answer(body={"resource": at, "authorization_servers": [at]}),
            METADATA: Answer(
                body={
                    "issuer": at,
                    "token_endpoint": f"{at}/token",
                    "device_authorization_endpoint": f"{at}/device",
                }
            ),
            "/device": Answer(
                body={
                    "device_code": "d",
                    "user_code": "ABCD-EFGH",
                    "verification_uri": f"{at}/page",
                    "expires_in": 0,
                    "interval": 0,
                }
            ),
            "/token": Answer(
                body={"access_token": "a.b.c", "token_type": "bearer", "expires_in": "60"}
            ),
            "/v1/me": Answer(body={"subject": f"ada{ESCAPE}", "scopes": ["admin:read"]}),
        }
        gateway.then(self.answer)

    def answer(self, seen: Seen) -> Answer:
        return self.answers.get(seen.path, Answer(404, {}))

    def change(self, path: str, **members: Any) -> None:
        """A member that is None is left out."""
        body: Json = {**self.answers[path].body, **members}
        left = {name: value for name, value in body.items() if value is not None}
        self.answers[path] = Answer(body=left)


@pytest.fixture
def house(gateway: Gateway) -> House:
    return House(gateway)


LogIn = Callable[..., Ran]


@pytest.fixture
def log_in(run: Run, capsys: pytest.CaptureFixture[str]) -> LogIn:
    """What the command runs, in the surroundings of `run`, but without reading the definitions of
    all others before each of many cases."""

    def log_in(url: str, **options: Any) -> Ran:
        try:
            login(url=url, no_browser=True, **options)
        except CommandFailed as failed:
            out, err = capsys.readouterr()
            return Ran(failed.exit, out, f"{err}chadburn: {failed.line}\n")
        return Ran(0, *capsys.readouterr())

    return log_in


def test_what_is_right_is_kept(run: Run, gateway: Gateway, house: House, tmp_path: Path) -> None:
    ran = run("login", "--url", gateway.url)
    assert ran.code == 0, ran.err
    assert ran.out == f"logged in at {gateway.url} as ada [2J (admin:read)\n"
    assert f"Open  {gateway.url}/page\nand type the code there:  ABCD-EFGH\n" in ran.err
    assert list((tmp_path / "config" / "chadburn").glob("*.json"))
    asked = next(seen for seen in gateway.seen if seen.path == "/token")
    assert asked.body["client_id"] == "chadburn"
    assert "authorization" not in asked.headers
    shown = [seen.headers.get("authorization") for seen in gateway.seen if seen.path == "/v1/me"]
    assert shown == ["Bearer a.b.c"]


NO_JSON = Answer(text="<html>", kind="text/html")
LARGE = Answer(text=" " * 300_000 + "{}")


@pytest.mark.parametrize(
    ("path", "answer", "code"),
    [
        *(
            (path, answer, code)
            for path in (RESOURCE, METADATA, "/device", "/token")
            for answer, code in [
                (NO_JSON, 7),
                (Answer(body=[]), 7),
                (Answer(text="[" * 100_000), 7),
                (LARGE, 7),
                (Answer(drop=True), 7),
                (Answer(503, {}), 7),
                (Answer(429, {}), 7),
                (Answer(302, {}, location="http://127.0.0.1:1/"), None),
                (Answer(403, text="no"), 6),
            ]
        ),
        (RESOURCE, Answer(404), 6),
        (METADATA, Answer(404), 6),
        ("/v1/me", Answer(401, {"title": "no", "reason": "TOKEN_AUDIENCE"}), 6),
        ("/v1/me", Answer(503, {}), 7),
        ("/device", Answer(400, {"error": "invalid_client"}), 6),
        ("/device", Answer(400, {"error": 7, "error_description": ["x"]}), 6),
        ("/token", Answer(400, {"error": "expired_token"}), 6),
        ("/token", Answer(400, {"error": "invalid_grant"}), 6),
        ("/token", Answer(200, {"error": "access_denied"}), 6),
        ("/token", Answer(403, {"error": "access_denied"}), 6),
        ("/token", Answer(429, {"error": "expired_token"}), 6),
        ("/token", Answer(400, {"error": f"x{ESCAPE}", "error_description": ESCAPE * 400}), 6),
    ],
)
def test_an_answer_that_is_none(
    log_in: LogIn, gateway: Gateway, house: House, path: str, answer: Answer, code: int | None
) -> None:
    house.answers[path] = answer
    refused(log_in, gateway, code)


@pytest.mark.parametrize(
    ("path", "members", "code"),
    [
        (RESOURCE, {"resource": "https://other.test"}, 6),
        (RESOURCE, {"resource": f"https://x{ESCAPE}.test"}, 6),
        (RESOURCE, {"resource": None}, 6),
        (RESOURCE, {"authorization_servers": []}, 2),
        (RESOURCE, {"authorization_servers": "x"}, 2),
        (RESOURCE, {"authorization_servers": [f"https://x.test/{ESCAPE}"]}, 2),
        (RESOURCE, {"authorization_servers": ["https://a.test", "https://b.test"]}, 2),
        (RESOURCE, {"authorization_servers": ["http://issuer.test"]}, 6),
        (RESOURCE, {"authorization_servers": ["file:///etc/passwd"]}, 6),
        (RESOURCE, {"authorization_servers": ["http://127.0.0.1:1@evil.test"]}, 6),
        (METADATA, {"issuer": "https://other.test"}, 6),
        (METADATA, {"issuer": None}, 6),
        (METADATA, {"token_endpoint": None}, 6),
        (METADATA, {"token_endpoint": 7}, 6),
        (METADATA, {"token_endpoint": "http://evil.test/token"}, 6),
        (METADATA, {"device_authorization_endpoint": None}, 6),
        (METADATA, {"device_authorization_endpoint": "http://evil.test/token"}, 6),
        (METADATA, {"revocation_endpoint": "ftp://evil.test"}, 6),
        ("/device", {"user_code": None}, 7),
        ("/device", {"device_code": ""}, 7),
        ("/device", {"verification_uri": None}, 7),
        ("/device", {"verification_uri": "javascript:alert(1)"}, 6),
        ("/device", {"verification_uri": "http://evil.test/"}, 6),
        ("/device", {"verification_uri": f"https://x.test/{ESCAPE}"}, 6),
        ("/device", {"verification_uri_complete": "file:///etc/passwd"}, 6),
        ("/device", {"verification_uri_complete": 7}, 6),
        ("/token", {"token_type": "DPoP"}, 6),
        ("/token", {"token_type": None}, 6),
        ("/token", {"access_token": None}, 7),
        ("/token", {"access_token": "a b"}, 7),
        ("/token", {"access_token": "a\nb"}, 7),
        ("/token", {"access_token": ""}, 7),
        ("/token", {"access_token": 7}, 7),
        ("/token", {"access_token": "a" * 20_000}, 7),
        ("/token", {"refresh_token": "a\x00b"}, 7),
        ("/token", {"refresh_token": 7}, 7),
    ],
)
def test_an_answer_that_says_something_wrong(
    log_in: LogIn, gateway: Gateway, house: House, path: str, members: Json, code: int
) -> None:
    house.change(path, **members)
    refused(log_in, gateway, code)


def refused(log_in: LogIn, gateway: Gateway, code: int | None) -> None:
    ran = log_in(gateway.url)
    assert ran.code == code or (code is None and ran.code in {6, 7}), ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert "\x1b" not in ran.err
    assert len(ran.err) < 1200
    assert ran.err.splitlines()[-1].startswith("chadburn: ")
    assert not Path("config").exists()
    assert all(seen.headers["host"] in gateway.url for seen in gateway.seen)


def test_a_code_to_show_moves_no_cursor(log_in: LogIn, gateway: Gateway, house: House) -> None:
    house.change("/device", user_code=f"AB{ESCAPE}CD")
    ran = log_in(gateway.url)
    assert (ran.code, "\x1b" in ran.err) == (0, False)


@pytest.mark.parametrize("lifetime", ["soon", -1, 0, None, True, {}, "1e999", 10**400])
def test_a_lifetime_that_is_none_is_a_short_one(
    log_in: LogIn, gateway: Gateway, house: House, lifetime: Any
) -> None:
    house.change("/token", expires_in=lifetime)
    ran = log_in(gateway.url)
    assert ran.code in {0, 7}
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://gateway.test", 2),
        ("ftp://127.0.0.1", 2),
        ("http://ada:secret@127.0.0.1:1", 2),
        ("http://127.0.0.1:1/?x=1", 2),
        ("http://127.0.0.1:1/#x", 2),
        ("http://[::1", 2),
        ("127.0.0.1:1", 2),
        ("http://127.0.0.1:1", 7),
    ],
)
def test_only_a_gateway_at_a_private_address_is_asked(log_in: LogIn, url: str, code: int) -> None:
    ran = log_in(url)
    assert (ran.code, ran.err.count("\n")) == (code, 1)
    assert "secret" not in ran.err


def test_a_named_issuer_is_one_of_the_gateway_s(
    log_in: LogIn, gateway: Gateway, house: House
) -> None:
    others = [gateway.url, "https://b.test"]
    house.change(RESOURCE, authorization_servers=others)
    assert log_in(gateway.url, issuer=gateway.url).code == 0
    ran = log_in(gateway.url, issuer="https://c.test")
    assert (ran.code, "takes no tokens of that issuer" in ran.err) == (2, True)
    assert log_in(gateway.url, issuer="http://b.test").code == 2


@pytest.mark.parametrize(
    ("url", "issuer", "good"),
    [
        ("https://gw.test", "https://id.test", True),
        ("https://gw.test", "http://id.test", False),
        ("https://gw.test", "http://127.0.0.1:8766", False),
        ("https://gw.test", "https://id.test/?x", False),
        ("http://127.0.0.1:8765", "http://127.0.0.1:8766", True),
        ("http://localhost:8765", "http://[::1]:8766", True),
        ("http://127.0.0.1:8765", "https://id.test", True),
    ],
)
def test_which_issuer_a_gateway_may_name(url: str, issuer: str, good: bool) -> None:
    gateway = Protected(url=url, issuers=(issuer,), scopes=(), audiences={})
    if good:
        assert gateway.issuer(None) == issuer
        return
    with pytest.raises(CommandFailed) as failed:
        gateway.issuer(None)
    assert failed.value.exit is Exit.REFUSED


def test_scopes_and_resource_are_the_gateway_s(
    log_in: LogIn, gateway: Gateway, house: House
) -> None:
    house.change(
        RESOURCE,
        scopes_supported=["admin:read", "admin:pause", "admin:weights.unsafe"],
        chadburn_audiences={gateway.url: "https://gw.test/admin"},
    )
    house.change(METADATA, scopes_supported=["offline_access", "admin:read"])
    cases: list[tuple[Json, str, str | None, str | None]] = [
        ({}, "offline_access admin:read", "https://gw.test/admin", None),
        ({"scope": ["a b", "c"]}, "a b c", "https://gw.test/admin", None),
        ({"resource": "", "audience": "x"}, "offline_access admin:read", None, "x"),
        ({"resource": "urn:x"}, "offline_access admin:read", "urn:x", None),
    ]
    for options, scope, resource, audience in cases:
        gateway.seen.clear()
        assert log_in(gateway.url, **options).code == 0
        asked = next(seen.body for seen in gateway.seen if seen.path == "/device")
        assert asked["scope"] == scope
        assert (asked.get("resource"), asked.get("audience")) == (resource, audience)
    # Where the issuer does not list ours, all are asked for but those that need asking.
    house.change(METADATA, scopes_supported=["openid"])
    gateway.seen.clear()
    log_in(gateway.url)
    asked = next(seen.body for seen in gateway.seen if seen.path == "/device")
    assert asked["scope"] == "openid admin:read admin:pause"


def test_waiting_slows_down_when_told_and_ends_in_time(gateway: Gateway) -> None:
    said = ["authorization_pending", "slow_down", "slow_down", "authorization_pending"]
    slept: list[float] = []

    def answer(_: Seen) -> Answer:
        return Answer(400, {"error": said.pop(0) if said else "authorization_pending"})

    gateway.then(answer)
    with pytest.raises(CommandFailed) as failed:
        wait(*device(gateway), sleep=slept.append, clock=lambda: sum(slept))
    assert slept[:5] == [5.0, 10.0, 15.0, 15.0, 15.0]
    assert 100 < sum(slept) <= 115
    assert failed.value.exit is Exit.REFUSED
    assert "nobody answered in time" in failed.value.line


def test_waiting_outlasts_an_issuer_that_is_away(gateway: Gateway) -> None:
    answers = [Answer(drop=True), Answer(503), Answer(400, {"error": "authorization_pending"})]
    good = Answer(body={"access_token": "t", "token_type": "Bearer"})
    gateway.then(lambda _: answers.pop(0) if answers else good)
    slept: list[float] = []
    said: list[str] = []
    at, who, begun = device(gateway)
    found = wait(at, who, begun, say=said.append, sleep=slept.append, clock=lambda: sum(slept))
    assert (found.access_token, slept) == ("t", [10.0, 20.0, 20.0])
    away, back = said
    assert away.startswith(f"no answer from {gateway.url}/token: ")
    assert away.endswith("; trying again")
    assert back == f"{gateway.url} answers again; still waiting for you"


def device(gateway: Gateway) -> tuple[IssuerEndpoints, AskedAs, Begun]:
    at = IssuerEndpoints(
        issuer=gateway.url,
        token=f"{gateway.url}/token",
        device=None,
        revocation=None,
        scopes=None,
    )
    begun = Begun(
        user_code="A",
        address=gateway.url,
        direct=None,
        device_code="d",
        interval_s=5.0,
        lasts_s=100.0,
    )
    return at, AskedAs(client_id="chadburn"), begun


def test_a_long_command_shows_the_token_of_the_moment(gateway: Gateway) -> None:
    gateway.then(Answer(body={}))
    tokens = iter(["first", "second"])
    calls = Calls(Target(gateway.url, lambda: next(tokens)))
    calls.get("/a")
    calls.get("/b")
    calls.close()
    shown = [seen.headers["authorization"] for seen in gateway.seen]
    assert shown == ["Bearer first", "Bearer second"]


def test_over_tls_only_who_is_known_is_told_anything(
    log_in: LogIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "authority")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*authority.issue("localhost"))
    with scripted(tls) as gateway:
        House(gateway)
        ran = log_in(gateway.url)
        assert (ran.code, gateway.seen) == (7, [])
        assert "certificate" in ran.err.lower()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
        assert log_in(gateway.url).code == 0
        # By another name it is another, whatever it says.
        ran = log_in(gateway.url.replace("localhost", "127.0.0.1"))
        assert (ran.code, "mismatch" in ran.err.lower()) == (7, True)


def test_what_is_for_this_machine_does_not_leave_it(
    log_in: LogIn, gateway: Gateway, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted() as proxy:
        proxy.then(Answer(500))
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        assert log_in(gateway.url).code == 0
        assert proxy.seen == []


def test_nothing_asks_for_a_secret_as_an_argument(run: Run) -> None:
    assert run("login", "--url", "http://127.0.0.1:1", "--client-secret", "x").code == 2
    ran = run("login", "--url", "http://127.0.0.1:1", "--client-secret-file", "x")
    assert (ran.code, "--client-credentials" in ran.err) == (2, True)
