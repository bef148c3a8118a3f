"""Authorization code with PKCE at the development issuer, refresh tokens, and their end."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import KeySet

from app.auth.principal import PrincipalKind
from app.auth.tokens.issuers import IssuerConfig
from app.auth.tokens.verifier import TokenVerifier
from app.devidp.codes import is_page_code, page_code
from app.domain.scopes import Scope
from tests.devidp.flows import (
    ADMIN,
    CALLBACK,
    INFERENCE,
    SECRET,
    URL,
    VERIFIER,
    Issuing,
    challenge,
    issuing,
    landed,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def at() -> AsyncIterator[Issuing]:
    made = issuing()
    async with made.http:
        yield made


def claims(at: Issuing, token: str) -> dict[str, Any]:
    keys = KeySet.import_key_set(at.issuer.jwks())  # type: ignore[arg-type]
    return dict(jwt.decode(token, keys, algorithms=["ES256"]).claims)


async def test_a_person_logs_in(at: Issuing) -> None:
    answer = await at.pick("otto")
    assert answer.status_code == 302
    assert answer.headers["location"].startswith(f"{CALLBACK}?")
    back = landed(answer)
    assert (back["state"], back["iss"]) == ("s", URL)
    body = (await at.exchange(back["code"])).json()
    assert body["scope"] == "openid profile admin:read admin:pause"
    judge = TokenVerifier([IssuerConfig(issuer=URL, audience=ADMIN)], http=at.http, now=at.clock)
    who = await judge.verify(body["access_token"])
    assert (who.subject, who.client_id, who.kind) == ("otto", "dashboard", PrincipalKind.PERSON)
    assert who.scopes == {Scope.READ, Scope.PAUSE}
    assert claims(at, body["access_token"])["groups"] == ["operators"]
    identity = claims(at, body["id_token"])
    assert (identity["aud"], identity["sub"], identity["nonce"]) == ("dashboard", "otto", "n")
    assert identity["iss"] == URL
    assert identity["name"] == "Otto"
    assert identity["auth_time"] == identity["iat"] == int(at.clock.at.timestamp())


@pytest.mark.parametrize(
    ("person", "scope", "granted"),
    [
        ("vera", "admin:read admin:weights", "admin:read"),
        ("tara", "admin:read admin:weights", "admin:read admin:weights"),
        ("otto", "openid admin:weights admin:abort", "openid admin:abort"),
        ("vera", None, "admin:read"),
        ("ada", "admin:settle", "admin:settle"),
    ],
)
async def test_each_person_gives_what_they_have(
    at: Issuing, person: str, scope: str | None, granted: str
) -> None:
    body = await at.logged_in(person, scope=scope)
    assert body["scope"] == granted
    scopes = set(claims(at, body["access_token"])["scope"].split())
    assert scopes == set(granted.split()) - {"openid"}


async def test_who_has_nothing_of_it_gives_nothing(at: Issuing) -> None:
    answer = landed(await at.pick("vera", scope="openid admin:pause"))
    assert (answer["error"], answer["state"], answer["iss"]) == ("access_denied", "s", URL)


async def test_enter_in_the_field_picks_nobody(at: Issuing) -> None:
    """A browser presses a form's first button then, unless that is disabled."""
    page = await at.authorize()
    first = re.search(r"<button[^>]*>", page.text)
    assert first is not None
    assert first.group() == "<button disabled hidden>"


async def test_saying_no(at: Issuing) -> None:
    answer = landed(await at.authorize("POST", form_deny="1"))
    assert (answer["error"], answer["iss"]) == ("access_denied", URL)
    assert "code" not in answer


@pytest.mark.parametrize("code", ["", "AAAAA-AAAAA", SECRET])
async def test_a_person_is_picked_with_the_code_of_the_run_alone(at: Issuing, code: str) -> None:
    answer = await at.authorize("POST", form_code=code, form_person="ada")
    assert answer.status_code == 403
    assert "location" not in answer.headers
    assert "That is not the code of this run." in answer.text
    assert page_code(SECRET) not in answer.text


def test_the_code_of_the_run_is_taken_however_it_is_typed() -> None:
    code = page_code(SECRET)
    assert page_code(SECRET + "x") != code
    for typed in (code, code.lower(), code.replace("-", ""), f" {code.replace('-', ' ')} "):
        assert is_page_code(typed, SECRET)
    assert not is_page_code(code + "A", SECRET)


@pytest.mark.parametrize(
    "changes",
    [
        {"client_id": None},
        {"client_id": "nobody"},
        {"client_id": '"\\é'},
        {"redirect_uri": None},
        {"redirect_uri": "https://evil.test/"},
        {"redirect_uri": "http://127.0.0.1:1/other"},
        {"redirect_uri": "http://127.0.0.1:1/auth/callback/"},
        {"redirect_uri": "http://127.0.0.1:1/auth/callback?x=1"},
        {"redirect_uri": "http://127.0.0.1:1/auth/callback#x"},
        {"redirect_uri": "http://127.0.0.1:1@evil.test/auth/callback"},
        {"redirect_uri": "http://127.0.0.1.evil.test/auth/callback"},
        {"redirect_uri": "http://localhost:1/auth/callback"},
        {"redirect_uri": "https://127.0.0.1:1/auth/callback"},
        {"redirect_uri": "http://127.0.0.1:123456/auth/callback"},
        {"redirect_uri": 'http://127.0.0.1:1/auth/callback"\\é'},
        {"client_id": "chadburn"},
    ],
)
async def test_nothing_goes_to_an_address_that_is_not_the_client_s(
    at: Issuing, changes: dict[str, str | None]
) -> None:
    for method in ("GET", "POST"):
        answer = await at.authorize(
            method, **changes, form_code=page_code(SECRET), form_person="ada"
        )
        assert answer.status_code == 400
        assert "location" not in answer.headers
        assert "evil" not in answer.text


@pytest.mark.parametrize(
    "uri", ["http://127.0.0.1:9/auth/callback", "http://[::1]:65535/auth/callback", CALLBACK]
)
async def test_a_loopback_address_may_have_any_port(at: Issuing, uri: str) -> None:
    answer = await at.pick("vera", redirect_uri=uri)
    assert answer.headers["location"].startswith(f"{uri}?code=")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"response_type": "token"}, "unsupported_response_type"),
        ({"response_type": 'code id_token"'}, "unsupported_response_type"),
        ({"response_type": None}, "unsupported_response_type"),
        ({"code_challenge": None}, "invalid_request"),
        ({"code_challenge": "short"}, "invalid_request"),
        ({"code_challenge_method": None}, "invalid_request"),
        ({"code_challenge_method": "plain"}, "invalid_request"),
        ({"scope": "admin:weights.unsafe"}, "invalid_scope"),
        ({"scope": "openid *"}, "invalid_scope"),
        ({"scope": "inference:generate"}, "invalid_scope"),
        ({"resource": INFERENCE}, "invalid_target"),
        ({"prompt": "none"}, "login_required"),
        ({"prompt": "none login"}, "invalid_request"),
    ],
)
async def test_other_faults_are_told_to_the_client(
    at: Issuing, changes: dict[str, str | None], error: str
) -> None:
    for method in ("GET", "POST"):
        answer = await at.authorize(
            method, **changes, form_code=page_code(SECRET), form_person="ada"
        )
        assert answer.status_code == 302
        assert answer.headers["location"].startswith(f"{CALLBACK}?")
        back = landed(answer)
        assert (back["error"], back["state"], back["iss"]) == (error, "s", URL)
        assert "code" not in back


async def test_a_parameter_that_comes_twice_is_refused(at: Issuing) -> None:
    answer = await at.http.get("/authorize?client_id=dashboard&client_id=chadburn")
    assert answer.status_code == 400
    assert "twice" in answer.text


async def test_a_code_is_good_once_and_its_second_use_ends_what_the_first_one_got(
    at: Issuing,
) -> None:
    code = await at.code()
    body = (await at.exchange(code)).json()
    again = await at.exchange(code)
    assert (again.status_code, again.json()["error"]) == (400, "invalid_grant")
    assert (await at.refresh(body["refresh_token"])).json()["error"] == "invalid_grant"


@pytest.mark.parametrize(
    "changes",
    [
        {"code_verifier": "w" * 43},
        {"redirect_uri": "http://127.0.0.1:50124/auth/callback"},
        {"client_id": "chadburn"},
        {"client_id": "operator", "client_secret": SECRET},
    ],
)
async def test_a_code_is_for_who_asked_for_it(at: Issuing, changes: dict[str, str]) -> None:
    code = await at.code()
    answer = await at.exchange(code, **changes)
    assert answer.status_code == 400
    assert answer.json()["error"] in {"invalid_grant", "unauthorized_client"}
    assert (await at.exchange(code)).status_code == 200


@pytest.mark.parametrize("verifier", ["", "short", challenge(VERIFIER)])
async def test_a_code_needs_its_verifier(at: Issuing, verifier: str) -> None:
    answer = await at.exchange(await at.code(), code_verifier=verifier)
    assert answer.status_code == 400
    assert answer.json()["error"] in {"invalid_grant", "invalid_request"}


async def test_a_code_is_good_for_a_minute(at: Issuing) -> None:
    code = await at.code()
    at.clock.wait(60)
    assert (await at.exchange(code)).json()["error"] == "invalid_grant"


async def test_the_dashboard_needs_its_secret(at: Issuing) -> None:
    code = await at.code()
    answer = await at.exchange(code, client_id="dashboard")
    assert (answer.status_code, answer.json()["error"]) == (401, "invalid_client")


async def test_refresh_tokens_are_used_once_and_make_new_ones(at: Issuing) -> None:
    first = await at.logged_in("tara", scope="openid admin:read admin:weights")
    at.clock.wait(1800)
    second = (await at.refresh(first["refresh_token"], scope="admin:read")).json()
    assert second["scope"] == "admin:read"
    third = (await at.refresh(second["refresh_token"])).json()
    assert third["scope"] == "openid admin:read admin:weights"
    before, after = (claims(at, body["id_token"]) for body in (first, third))
    assert (before["auth_time"], before["sid"]) == (after["auth_time"], after["sid"])
    assert after["iat"] == before["iat"] + 1800
    assert "nonce" not in after
    # Whoever shows a spent one has a copy of it: the login ends for both.
    assert (await at.refresh(first["refresh_token"])).json()["error"] == "invalid_grant"
    assert (await at.refresh(third["refresh_token"])).json()["error"] == "invalid_grant"
    # No other login of the same person does.
    assert (await at.refresh((await at.logged_in("tara"))["refresh_token"])).status_code == 200


@pytest.mark.parametrize(
    ("form", "error"),
    [
        ({"scope": "openid admin:abort"}, "invalid_scope"),
        ({"resource": INFERENCE}, "invalid_target"),
        ({"client_id": "chadburn"}, "invalid_grant"),
        ({"client_id": "operator", "client_secret": SECRET}, "unauthorized_client"),
    ],
)
async def test_a_refresh_token_gives_no_more_and_to_nobody_else(
    at: Issuing, form: dict[str, str], error: str
) -> None:
    token = (await at.logged_in())["refresh_token"]
    assert (await at.refresh(token, **form)).json()["error"] == error
    assert (await at.refresh(token)).status_code == 200


async def test_a_login_ends_after_thirty_days_however_often_it_is_refreshed(at: Issuing) -> None:
    token = (await at.logged_in())["refresh_token"]
    at.clock.wait(20 * 86_400)
    token = (await at.refresh(token)).json()["refresh_token"]
    at.clock.wait(10 * 86_400)
    assert (await at.refresh(token)).json()["error"] == "invalid_grant"


async def test_revocation_ends_the_login(at: Issuing) -> None:
    first = await at.logged_in()
    second = (await at.refresh(first["refresh_token"])).json()
    form = {"token": first["refresh_token"]}
    stranger = await at.http.post("/revoke", data={**form, "client_id": "chadburn"})
    assert stranger.json()["error"] == "invalid_grant"
    for token in (first["refresh_token"], "unknown"):
        answer = await at.http.post("/revoke", data={"token": token}, auth=("dashboard", SECRET))
        assert answer.status_code == 200
    assert (await at.refresh(second["refresh_token"])).json()["error"] == "invalid_grant"


async def test_logout_through_the_browser_ends_the_login_and_leads_back(at: Issuing) -> None:
    body = await at.logged_in()
    at.clock.wait(7200)  # an ID token that has expired still tells whose login it was
    query = {
        "id_token_hint": body["id_token"],
        "post_logout_redirect_uri": "http://127.0.0.1:50123/",
        "state": "bye",
    }
    answer = await at.http.get("/end_session", params=query)
    assert answer.headers["location"] == "http://127.0.0.1:50123/?state=bye"
    assert (await at.refresh(body["refresh_token"])).json()["error"] == "invalid_grant"


@pytest.mark.parametrize(
    "changes",
    [
        {"post_logout_redirect_uri": "https://evil.test/"},
        {"post_logout_redirect_uri": "http://127.0.0.1:50123/elsewhere"},
        {"id_token_hint": ""},
    ],
)
async def test_logout_leads_nowhere_else(at: Issuing, changes: dict[str, str]) -> None:
    body = await at.logged_in()
    query = {
        "id_token_hint": body["id_token"],
        "post_logout_redirect_uri": "http://127.0.0.1:50123/",
        "client_id": "dashboard",
        **changes,
    }
    answer = await at.http.get("/end_session", params=query)
    assert answer.status_code == 200
    assert "location" not in answer.headers


async def test_logout_takes_no_token_of_another_issuer(at: Issuing) -> None:
    other = issuing()
    async with other.http:
        foreign = (await other.logged_in())["id_token"]
    body = await at.logged_in()
    for hint in (foreign, "garbage", body["access_token"] + "x"):
        query = {"id_token_hint": hint, "client_id": "dashboard"}
        assert (await at.http.get("/end_session", params=query)).status_code == 400
    assert (await at.refresh(body["refresh_token"])).status_code == 200


async def test_what_is_said_of_it_is_true(at: Issuing) -> None:
    documents = [
        (await at.http.get(f"/.well-known/{name}")).json()
        for name in ("openid-configuration", "oauth-authorization-server")
    ]
    assert documents[0] == documents[1]
    said = documents[0]
    assert said["issuer"] == URL
    assert said["code_challenge_methods_supported"] == ["S256"]
    assert said["authorization_response_iss_parameter_supported"] is True
    for name, address in said.items():
        if name.endswith("_endpoint") or name == "jwks_uri":
            assert (await at.http.get(address)).status_code != 404, name
    for grant in said["grant_types_supported"]:
        answer = await at.token(grant_type=grant)
        assert answer.json()["error"] != "unsupported_grant_type"


@pytest.mark.parametrize("path", ["/authorize", "/device", "/end_session", "/device?user_code=A"])
async def test_pages_are_kept_apart_from_others(at: Issuing, path: str) -> None:
    page = await (at.authorize() if path == "/authorize" else at.http.get(path))
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["x-content-type-options"] == "nosniff"
    for active in ("<script", "style=", "onclick", "javascript:"):
        assert active not in page.text
    # Where a browser may end up after the form, and nowhere else.
    leads = " http://127.0.0.1:50123" if path == "/authorize" else ""
    assert policy.endswith(f"form-action 'self'{leads}")
    assert (await at.http.get("/style.css")).headers["content-type"].startswith("text/css")


async def test_what_a_client_sends_is_no_markup_on_the_page(at: Issuing) -> None:
    page = await at.authorize(state='"><u>x', nonce="<u>x", scope="openid")
    assert page.status_code == 200
    assert "<u>" not in page.text


@pytest.mark.parametrize("origin", ["https://evil.test", "null", "http://127.0.0.1:1", "http://x"])
async def test_forms_of_other_pages_are_not_taken(at: Issuing, origin: str) -> None:
    for path in ("/authorize", "/device", "/end_session"):
        answer = await at.http.post(
            path, data={"code": page_code(SECRET), "person": "ada"}, headers={"origin": origin}
        )
        assert answer.status_code == 403
    own = await at.http.post("/token", data={"grant_type": "x"}, headers={"origin": URL})
    assert own.status_code == 403
