"""What logins are made of: sealing, places, clients, and the tokens that an issuer signs."""

from __future__ import annotations

import base64
import hashlib
import secrets
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.auth.sessions.clients import LoginAuth, LoginClient, default_name
from app.auth.sessions.errors import CrossSiteRefused, ReturnRefused
from app.auth.sessions.issuer_tokens import Unfit, judge_id_token
from app.auth.sessions.places import BrowserPlace, cookies_named
from app.auth.sessions.sealing import SealingKeys, Unsealable, read_key
from app.auth.tokens.compact import CompactToken
from app.auth.tokens.issuers import IssuerConfig

ONE, TWO = bytes(range(32)), bytes(range(1, 33))
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
ISSUER, CLIENT, ACCESS = "https://id.test", "dashboard", "an.access.token"
HTTPS, PREFIXED = BrowserPlace("https://gw.test"), BrowserPlace("https://gw.test/chadburn")


def sealing(*keys: bytes) -> SealingKeys:
    return SealingKeys(keys, secrets.token_bytes)


# ---- sealing ----


def test_what_is_sealed_is_read_by_the_same_key_for_the_same_purpose_alone() -> None:
    document = {"access": "secret", "refresh": None}
    sealed = sealing(ONE, TWO).seal(document, "row 1")
    assert b"secret" not in sealed
    assert sealing(ONE).unseal(sealed, "row 1") == document
    assert sealing(TWO, ONE).unseal(sealed, "row 1") == document
    assert sealing(ONE).seal(document, "row 1") != sealed, "no two are alike"
    for keys, purpose in (((TWO,), "row 1"), ((ONE,), "row 2"), ((ONE,), "")):
        with pytest.raises(Unsealable):
            sealing(*keys).unseal(sealed, purpose)


@given(st.integers(0, 60), st.integers(1, 255))
def test_nothing_of_it_can_be_changed(place: int, change: int) -> None:
    keys = sealing(ONE)
    sealed = bytearray(keys.seal({"a": "b" * 20}, "p"))
    sealed[place % len(sealed)] ^= change
    with pytest.raises(Unsealable):
        keys.unseal(bytes(sealed), "p")


@given(st.binary(max_size=80))
def test_what_was_never_sealed(sealed: bytes) -> None:
    with pytest.raises(Unsealable):
        sealing(ONE).unseal(sealed, "p")


def test_parts_of_what_was_sealed() -> None:
    keys = sealing(ONE)
    sealed = keys.seal({}, "p")
    for size in range(len(sealed)):
        with pytest.raises(Unsealable):
            keys.unseal(sealed[:size], "p")


@pytest.mark.parametrize("keys", [(), (ONE, ONE), (ONE[:31],), (ONE, TWO + b"x")])
def test_keys_that_are_none(keys: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError, match="key"):
        sealing(*keys)


def test_keys_in_files() -> None:
    key = bytes([251, 255, *range(30)])
    assert read_key(base64.b64encode(key).decode() + "\n") == key
    assert read_key(base64.urlsafe_b64encode(key).decode()) == key
    for text in ("", "short", "é" * 44, base64.b64encode(key + b"x").decode()):
        with pytest.raises(ValueError, match="base64"):
            read_key(text)


# ---- places ----


@pytest.mark.parametrize(
    ("base", "origin", "prefix", "cookie"),
    [
        ("https://gw.test", "https://gw.test", "", "__Host-chadburn-session"),
        ("https://gw.test:443", "https://gw.test", "", "__Host-chadburn-session"),
        ("https://GW.test:8443/a/b", "https://gw.test:8443", "/a/b", "__Host-chadburn-session"),
        ("http://127.0.0.1:8765", "http://127.0.0.1:8765", "", "chadburn-session"),
        ("http://[::1]:80", "http://[::1]", "", "chadburn-session"),
    ],
)
def test_where_the_gateway_is(base: str, origin: str, prefix: str, cookie: str) -> None:
    place = BrowserPlace(base)
    assert (place.origin, place.prefix, place.session_cookie) == (origin, prefix, cookie)


def test_cookies_of_the_gateway() -> None:
    text = "__Host-chadburn-session=x; Path=/; HttpOnly; SameSite=Lax; Secure; Max-Age=5"
    assert HTTPS.cookie(HTTPS.session_cookie, "x", 5) == text
    plain = BrowserPlace("http://127.0.0.1:1").cookie("c", "x", None)
    assert plain == "c=x; Path=/; HttpOnly; SameSite=Lax"


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([], ()),
        (["a=1"], ("1",)),
        (["b=2; a=1;c=3"], ("1",)),
        (["a=1", "b=2; a=3"], ("1", "3")),
        (["a=1=2; A=3; xa=4; a"], ("1=2",)),
        (["a=; a =5"], ("",)),
    ],
)
def test_cookies_of_a_request(headers: list[str], found: tuple[str, ...]) -> None:
    assert cookies_named("a", headers) == found


@pytest.mark.parametrize(
    "path", ["/", "/engines/e1", "/a?next=//evil.test&x=%2f#y", "/auth/session", "/auth/"]
)
def test_ways_back(path: str) -> None:
    assert HTTPS.return_path(path) == path
    assert PREFIXED.return_path(f"/chadburn{path}") == f"/chadburn{path}"
    with pytest.raises(ReturnRefused):
        PREFIXED.return_path(path)


def test_the_way_back_where_none_was_named() -> None:
    assert HTTPS.return_path(None) == "/auth/"
    assert PREFIXED.return_path(None) == "/chadburn/auth/"
    for path in ("/chadburn", "/chadburnx/a", "/chadburn/auth/login", "//chadburn/a"):
        with pytest.raises(ReturnRefused):
            PREFIXED.return_path(path)


@given(st.text(max_size=40))
def test_no_way_back_leads_elsewhere(text: str) -> None:
    """As browsers read it: tabs and line breaks are left out, backslashes are slashes."""
    try:
        path = HTTPS.return_path(text)
    except ReturnRefused:
        return
    read = path.replace("\\", "/")
    assert read.startswith("/")
    assert not read.startswith("//")
    assert not any(char in path for char in "\t\r\n\x00 ")


class Headers(dict[str, list[str]]):
    def getlist(self, key: str) -> list[str]:
        return self.get(key.lower(), [])


def test_headers_that_are_there_twice() -> None:
    ours = {
        "origin": ["https://gw.test"],
        "sec-fetch-site": ["same-origin"],
        "x-requested-with": ["chadburn"],
    }
    HTTPS.refuse_cross_site("POST", Headers(ours))
    for name, values in (
        ("origin", ["https://gw.test", "https://evil.test"]),
        ("sec-fetch-site", ["same-origin", "cross-site"]),
        ("sec-fetch-site", ["same-origin", "none"]),
        ("x-requested-with", ["chadburn", "chadburn"]),
        ("x-requested-with", ["chadburn", "x"]),
    ):
        with pytest.raises(CrossSiteRefused):
            HTTPS.refuse_cross_site("POST", Headers({**ours, name: values}))
    for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "post", "get", "TRACE"):
        with pytest.raises(CrossSiteRefused):
            HTTPS.refuse_cross_site(method, Headers())
    for method in ("GET", "HEAD"):
        HTTPS.refuse_cross_site(method, Headers())


# ---- clients ----


@pytest.mark.parametrize(
    ("issuer", "name"),
    [
        ("https://login.example.org/realms/x", "login-example-org"),
        ("http://127.0.0.1:8766", "127-0-0-1"),
        ("https://" + "a" * 40 + ".test", "a" * 32),
        ("http://[::1]", "1"),
    ],
)
def test_names_of_issuers(issuer: str, name: str) -> None:
    assert default_name(issuer) == name
    config = IssuerConfig(issuer=issuer, audience="a")
    assert LoginClient(config=config, name=name, client_id="c").auth is LoginAuth.NONE


# ---- ID tokens ----


def client() -> LoginClient:
    config = IssuerConfig(issuer=ISSUER, audience="urn:admin")
    return LoginClient(config=config, name="id", client_id=CLIENT)


def half(size: str) -> str:
    digest = hashlib.new(size, ACCESS.encode()).digest()
    return base64.urlsafe_b64encode(digest[: len(digest) // 2]).rstrip(b"=").decode()


def token(alg: str = "RS256", typ: str | None = None, **claims: Any) -> CompactToken:
    now = int(NOW.timestamp())
    all_of_them = {
        "iss": ISSUER,
        "aud": CLIENT,
        "sub": "ada",
        "exp": now + 300,
        "iat": now,
        "nonce": "n",
        "sid": "s1",
        **claims,
    }
    kept = {name: value for name, value in all_of_them.items() if value is not ...}
    return CompactToken(text="", claims=kept, alg=alg, kid=None, typ=typ)


def judged(found: CompactToken, nonce: str | None = "n") -> tuple[str, str | None]:
    logged_in = judge_id_token(found, client(), nonce=nonce, access_token=ACCESS, now=NOW)
    return logged_in.subject, logged_in.provider_session


SECOND = int(NOW.timestamp())


@pytest.mark.parametrize(
    "found",
    [
        token(),
        token(typ="JWT"),
        token(typ="jwt"),
        token(aud=[CLIENT]),
        token(aud=[CLIENT, "other"], azp=CLIENT),
        token(azp=CLIENT),
        token(exp=SECOND - 29),
        token(exp=SECOND + 0.5),
        token(iat=SECOND + 30),
        token(at_hash=half("sha256")),
        token(alg="ES384", at_hash=half("sha384")),
        token(alg="PS512", at_hash=half("sha512")),
        token(alg="EdDSA", at_hash=half("sha512")),
        token(alg="Ed25519", at_hash=half("sha512")),
    ],
)
def test_good_id_tokens(found: CompactToken) -> None:
    assert judged(found) == ("ada", "s1")
    assert judged(token(sid=...)) == ("ada", None)
    assert judged(token(nonce=...), nonce=None) == ("ada", "s1")


@pytest.mark.parametrize(
    "found",
    [
        token(typ="at+jwt"),
        token(typ="logout+jwt"),
        token(events={}),
        token(iss="https://id.test/"),
        token(iss=...),
        token(aud="other"),
        token(aud=[]),
        token(aud=...),
        token(aud={CLIENT: 1}),
        token(aud=[CLIENT, "other"]),
        token(azp="other"),
        token(azp=""),
        token(exp=SECOND - 30),
        token(exp=...),
        token(exp="never"),
        token(exp=True),
        token(exp=float("inf")),
        token(exp=-1),
        token(exp=1e15),
        token(iat=SECOND + 31),
        token(iat=...),
        token(iat=None),
        token(nonce="N"),
        token(nonce=""),
        token(nonce=...),
        token(nonce=["n"]),
        token(nonce="ñ"),
        token(at_hash=half("sha384")),
        token(at_hash=""),
        token(at_hash=None),
        token(sub=...),
        token(sub=""),
        token(sub=1),
        token(sub="a" * 256),
        token(sub="a\nb"),
        token(sid=1),
        token(sid=""),
    ],
)
def test_bad_id_tokens(found: CompactToken) -> None:
    with pytest.raises(Unfit):
        judged(found)
