"""The device authorization grant (RFC 8628) of the development issuer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from app.devidp.clients import DEVICE
from app.devidp.codes import page_code
from tests.devidp.flows import INFERENCE, SECRET, URL, Issuing, issuing

pytestmark = pytest.mark.anyio


@pytest.fixture
async def at() -> AsyncIterator[Issuing]:
    made = issuing()
    async with made.http:
        yield made


async def start(at: Issuing, **form: str) -> dict[str, Any]:
    data = {"client_id": "chadburn", "scope": "openid admin:read admin:pause", **form}
    answer = await at.http.post("/device_authorization", data=data)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return dict(answer.json())


async def poll(at: Issuing, device_code: str, client_id: str = "chadburn") -> httpx2.Response:
    return await at.token(grant_type=DEVICE, device_code=device_code, client_id=client_id)


async def decide(at: Issuing, user_code: str, **form: str) -> httpx2.Response:
    data = {"user_code": user_code, "code": page_code(SECRET), **form}
    return await at.http.post("/device", data=data, headers={"origin": URL})


async def test_a_person_lets_a_device_in(at: Issuing) -> None:
    begun = await start(at)
    assert (begun["interval"], begun["expires_in"]) == (5, 600)
    assert begun["verification_uri"] == f"{URL}/device"
    assert (await poll(at, begun["device_code"])).json()["error"] == "authorization_pending"
    page = await at.http.get(begun["verification_uri_complete"])
    assert begun["user_code"] in page.text
    assert "The chadburn command line" in page.text
    done = await decide(at, begun["user_code"], person="otto")
    assert (done.status_code, "Hello, Otto" in done.text) == (200, True)
    at.clock.wait(5)
    body = (await poll(at, begun["device_code"])).json()
    assert body["scope"] == "openid admin:read admin:pause"
    assert body["id_token"]
    assert (await at.refresh(body["refresh_token"], client_id="chadburn")).status_code == 200


async def test_a_device_code_is_good_once(at: Issuing) -> None:
    begun = await start(at)
    await decide(at, begun["user_code"], person="vera")
    assert (await poll(at, begun["device_code"])).json()["scope"] == "openid admin:read"
    assert (await poll(at, begun["device_code"])).json()["error"] == "invalid_grant"
    page = await at.http.get("/device", params={"user_code": begun["user_code"]})
    assert page.status_code == 404


async def test_who_asks_too_often_is_slowed_down_for_good(at: Issuing) -> None:
    device_code = (await start(at))["device_code"]
    told = []
    for wait_s in (0, 5, 4, 10, 9, 15):
        at.clock.wait(wait_s)
        told.append((await poll(at, device_code)).json()["error"])
    pending, slower = "authorization_pending", "slow_down"
    assert told == [pending, pending, slower, pending, slower, pending]


@pytest.mark.parametrize("form", [{"deny": "1"}, {"person": "nobody"}, {}])
async def test_a_device_that_is_refused_is_told_once(at: Issuing, form: dict[str, str]) -> None:
    begun = await start(at)
    assert "Refused" in (await decide(at, begun["user_code"], **form)).text
    assert (await poll(at, begun["device_code"])).json()["error"] == "access_denied"
    assert (await poll(at, begun["device_code"])).json()["error"] == "invalid_grant"


async def test_who_has_nothing_of_it_refuses(at: Issuing) -> None:
    begun = await start(at, scope="openid admin:shutdown")
    await decide(at, begun["user_code"], person="vera")
    assert (await poll(at, begun["device_code"])).json()["error"] == "access_denied"


async def test_codes_expire(at: Issuing) -> None:
    waiting, granted = await start(at), await start(at)
    await decide(at, granted["user_code"], person="vera")
    at.clock.wait(600)
    for begun in (waiting, granted):
        assert (await poll(at, begun["device_code"])).json()["error"] == "expired_token"
    late = await decide(at, waiting["user_code"], person="vera")
    assert late.status_code == 404


async def test_the_code_of_the_run_is_needed(at: Issuing) -> None:
    begun = await start(at)
    answer = await decide(at, begun["user_code"], person="ada", code="AAAAA-AAAAA")
    assert answer.status_code == 403
    assert (await poll(at, begun["device_code"])).json()["error"] == "authorization_pending"


@pytest.mark.parametrize("change", [str.lower, lambda code: code.replace("-", " "), str.strip])
async def test_a_device_s_code_is_found_however_it_is_typed(at: Issuing, change: Any) -> None:
    begun = await start(at)
    page = await at.http.get("/device", params={"user_code": change(begun["user_code"])})
    assert page.status_code == 200
    assert begun["user_code"] in page.text


async def test_a_device_code_is_its_client_s(at: Issuing) -> None:
    begun = await start(at)
    await decide(at, begun["user_code"], person="ada")
    for client_id in ("nobody", "dashboard"):
        answer = await poll(at, begun["device_code"], client_id)
        assert answer.json()["error"] == "invalid_client"
    assert (await poll(at, "unknown")).json()["error"] == "invalid_grant"
    assert (await poll(at, begun["device_code"])).status_code == 200


@pytest.mark.parametrize(
    ("form", "error"),
    [
        ({"client_id": "nobody"}, "invalid_client"),
        ({"client_id": "dashboard", "client_secret": SECRET}, "unauthorized_client"),
        ({"client_id": "dashboard"}, "invalid_client"),
        ({"scope": "admin:weights.unsafe"}, "invalid_scope"),
        ({"resource": INFERENCE}, "invalid_target"),
    ],
)
async def test_what_may_not_begin(at: Issuing, form: dict[str, str], error: str) -> None:
    data = {"client_id": "chadburn", "scope": "admin:read", **form}
    answer = await at.http.post("/device_authorization", data=data)
    assert answer.status_code in {400, 401}
    assert answer.json()["error"] == error
