"""How long a session lasts, how its tokens are renewed, and how it ends, on a clock to turn."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from app.auth.principal import PrincipalKind
from app.auth.sessions.errors import (
    LoginReplayed,
    LoginUnknown,
    LogoutTokenRefused,
    SessionEnded,
)
from app.auth.sessions.house import LoginHouse
from app.auth.sessions.issuer_tokens import LOGOUT_EVENT
from app.auth.sessions.kept import Visitor
from app.auth.sessions.logins import LOGIN_S
from app.auth.tokens.errors import IssuerUnavailable
from app.ledger import Ledger, upgrade
from app.ledger.browser_sessions import StoredSession
from tests.auth.housed import KEY, Housed, Turned, housed
from tests.devidp.flows import TTL_S, URL

pytestmark = pytest.mark.anyio

IDLE_S, LONGEST_S = 1800, 43_200
OTHER_KEY = bytes(range(1, 33))


@pytest.fixture
async def at(tmp_path: Path, ledger_url: str) -> AsyncIterator[Housed]:
    async with housed(tmp_path, ledger_url) as made:
        yield made


async def stored(at: Housed, house: LoginHouse, cookie: str) -> StoredSession:
    session = await house.desk.found([cookie])
    assert session is not None
    return session


async def keep_busy(at: Housed, house: LoginHouse, cookie: str, seconds: int) -> None:
    """Somebody at work, who is never away for long."""
    for passed in range(0, seconds, 1500):
        at.clock.wait(min(1500, seconds - passed))
        await at.who(house, cookie)


# ---- the login ----


async def test_a_login_is_over_after_ten_minutes(at: Housed) -> None:
    house = at.open()
    answer, cookie = await at.came_back(house)
    at.clock.wait(LOGIN_S)
    with pytest.raises(LoginUnknown):
        await house.logins.finish(answer, [cookie], Visitor())


async def test_of_two_that_bring_the_same_answer_one_logs_in(at: Housed) -> None:
    """To two gateways at once."""
    one, other = at.open(), at.open()
    answer, cookie = await at.came_back(one)
    results = await asyncio.gather(
        *(house.logins.finish(answer, [cookie], Visitor()) for house in (one, other)),
        return_exceptions=True,
    )
    assert sorted(type(result).__name__ for result in results) == ["Finished", "LoginReplayed"]
    assert at.wire.calls["/token"] == 1
    with pytest.raises(LoginReplayed):
        await one.logins.finish(answer, [cookie], Visitor())


async def test_an_issuer_that_is_down(at: Housed) -> None:
    house = at.open()
    at.wire.down = True
    client = house.logins.client_for(None)
    assert client is not None
    for _ in range(3):
        with pytest.raises(IssuerUnavailable):
            await house.logins.begin(client, None)
    assert at.wire.calls.total() == 1, "it is not asked again at once"
    at.wire.down = False
    at.clock.wait(10)
    assert (await house.logins.begin(client, None)).location.startswith(f"{URL}/")


# ---- how long ----


async def test_it_is_over_when_nobody_is_at_work(at: Housed) -> None:
    house = at.open()
    cookie = await at.log_in(house)
    who = await at.who(house, cookie)
    assert (who.subject, who.kind) == ("otto", PrincipalKind.PERSON)
    at.clock.wait(IDLE_S - 1)
    await at.who(house, cookie)  # noticed
    at.clock.wait(IDLE_S - 1)
    await at.who(house, cookie, in_use=False)  # a stream, which shows nobody
    at.clock.wait(1)
    with pytest.raises(SessionEnded):
        await at.who(house, cookie)


async def test_use_is_written_down_once_a_minute(at: Housed) -> None:
    house = at.open()
    cookie = await at.log_in(house)
    began = (await stored(at, house, cookie)).seen_at
    for seconds, noticed in ((59, 0), (1, 60), (30, 60)):
        at.clock.wait(seconds)
        await at.who(house, cookie)
        assert (await stored(at, house, cookie)).seen_at == began + timedelta(seconds=noticed)


async def test_it_is_over_some_day_however_busy(at: Housed) -> None:
    house = at.open()
    cookie = await at.log_in(house)
    await keep_busy(at, house, cookie, LONGEST_S - 1500)
    at.clock.wait(1499)
    await at.who(house, cookie)
    at.clock.wait(1)
    with pytest.raises(SessionEnded):
        await at.who(house, cookie)
    assert not await at.ledger.browser_sessions.forget_over()


async def test_without_a_refresh_token_it_ends_with_its_token(at: Housed) -> None:
    house = at.open(rules={"idle_s": 10 * TTL_S})
    cookie = await at.log_in(house)
    session = await stored(at, house, cookie)
    none = replace(house.desk._safe.take(session), refresh=None)  # as other issuers give none
    await at.reseal(session, house.desk._safe.put(session.digest, none))
    at.clock.wait(TTL_S + 29)  # within the leeway
    await at.who(house, cookie)
    at.clock.wait(1)
    with pytest.raises(SessionEnded):
        await at.who(house, cookie)
    with pytest.raises(SessionEnded):
        await stored(at, house, cookie)
    assert await at.audited() == [("login", None), ("end_session", "TOKEN_EXPIRED")]


# ---- keys ----


async def test_keys_are_changed_while_sessions_go_on(at: Housed) -> None:
    house = at.open()
    cookie = await at.log_in(house)
    both = at.open(keys=(OTHER_KEY, KEY))
    assert (await at.who(both, cookie)).subject == "otto"
    with pytest.raises(SessionEnded):
        await at.who(at.open(keys=(OTHER_KEY,)), cookie)
    await keep_busy(at, both, cookie, TTL_S)  # refreshed, and so sealed anew
    assert (await at.who(at.open(keys=(OTHER_KEY,)), cookie)).subject == "otto"


async def test_tokens_of_one_row_are_none_in_another(at: Housed) -> None:
    house = at.open()
    ada, vera = await at.log_in(house, "ada"), await at.log_in(house, "vera")
    hers = await stored(at, house, ada)
    mine = await stored(at, house, vera)
    await at.reseal(mine, hers.sealed)
    with pytest.raises(SessionEnded):
        await at.who(house, vera)


# ---- renewing ----


async def test_of_many_at_two_gateways_one_refreshes(at: Housed) -> None:
    one, other = (at.open(rules={"idle_s": 2 * TTL_S}) for _ in range(2))
    await refreshed_by_one(at, one, other)


async def test_of_many_at_two_gateways_on_one_postgres_one_refreshes(
    tmp_path: Path, postgres_url: str
) -> None:
    await upgrade(postgres_url)
    async with housed(tmp_path, postgres_url) as at:
        ledger = await Ledger.open(postgres_url, clock=Turned(at.clock))
        try:
            rules = {"idle_s": 2 * TTL_S}
            await refreshed_by_one(at, at.open(rules=rules), at.open(rules=rules, ledger=ledger))
        finally:
            await ledger.close()


async def refreshed_by_one(at: Housed, one: LoginHouse, other: LoginHouse) -> None:
    cookie = await at.log_in(one)
    for _ in range(3):
        before = at.wire.calls["/token"]
        at.clock.wait(TTL_S)
        at.wire.gate = asyncio.Event()
        asking = [
            asyncio.create_task(at.who(house, cookie)) for _ in range(5) for house in (one, other)
        ]
        await at.wire.asked("/token", before + 1)
        at.wire.gate.set()
        assert {who.subject for who in await asyncio.gather(*asking)} == {"otto"}
        assert at.wire.calls["/token"] == before + 1


async def test_while_the_old_token_is_good_nobody_waits_for_another_gateway(at: Housed) -> None:
    one, other = at.open(rules={"idle_s": 2 * TTL_S}), at.open(rules={"idle_s": 2 * TTL_S})
    cookie = await at.log_in(one)
    at.clock.wait(TTL_S - 20)
    at.wire.gate = asyncio.Event()
    before = at.wire.calls["/token"]
    asking = asyncio.create_task(at.who(one, cookie))
    await at.wire.asked("/token", before + 1)
    assert (await at.who(other, cookie)).subject == "otto"
    at.wire.gate.set()
    assert (await asking).expires_at == (await at.who(one, cookie)).expires_at


async def test_a_caller_who_hangs_up_takes_no_token_along(at: Housed) -> None:
    house = at.open(rules={"idle_s": 2 * TTL_S})
    cookie = await at.log_in(house)
    at.clock.wait(TTL_S + 60)
    at.wire.gate = asyncio.Event()
    before = at.wire.calls["/token"]
    asking = asyncio.create_task(at.who(house, cookie))
    await at.wire.asked("/token", before + 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    at.wire.gate.set()
    assert (await at.who(house, cookie)).subject == "otto"
    assert at.wire.calls["/token"] == before + 1
    await house.aclose(60)


async def test_an_issuer_that_is_down_ends_no_session(at: Housed) -> None:
    house = at.open(rules={"idle_s": 4 * TTL_S})
    cookie = await at.log_in(house)
    at.clock.wait(TTL_S - 20)
    at.wire.down = True
    assert (await at.who(house, cookie)).subject == "otto", "its token is good for 20 s"
    at.clock.wait(60)
    for _ in range(3):
        with pytest.raises(IssuerUnavailable):
            await at.who(house, cookie)
    at.wire.down = False
    at.clock.wait(10)
    assert (await at.who(house, cookie)).subject == "otto"
    assert await at.audited() == [("login", None)]


async def test_an_answer_that_was_lost_may_cost_the_session_and_nothing_more(at: Housed) -> None:
    """The issuer has spent the refresh token, and takes its next use for a theft."""
    house = at.open(rules={"idle_s": 4 * TTL_S})
    cookie = await at.log_in(house)
    at.clock.wait(TTL_S + 60)
    at.wire.lose_answers = True
    with pytest.raises(IssuerUnavailable):
        await at.who(house, cookie)
    at.wire.lose_answers = False
    at.clock.wait(10)
    with pytest.raises(SessionEnded):
        await at.who(house, cookie)
    assert await at.audited() == [("login", None), ("end_session", "REFRESH_REFUSED")]


async def test_a_session_that_ends_meanwhile_is_not_brought_back(at: Housed) -> None:
    house = at.open(rules={"idle_s": 2 * TTL_S})
    cookie = await at.log_in(house)
    at.clock.wait(TTL_S + 60)
    session = await stored(at, house, cookie)
    at.wire.gate = asyncio.Event()
    before = at.wire.calls["/token"]
    asking = asyncio.create_task(at.who(house, cookie))
    await at.wire.asked("/token", before + 1)
    await house.desk.log_out(session, Visitor())
    at.wire.gate.set()
    with pytest.raises(SessionEnded):
        await asking
    with pytest.raises(SessionEnded):
        await at.who(house, cookie)


# ---- logging out ----


async def test_after_a_logout_its_refresh_token_is_good_for_nothing(at: Housed) -> None:
    house = at.open()
    cookie = await at.log_in(house)
    session = await stored(at, house, cookie)
    refresh = house.desk._safe.take(session).refresh
    assert refresh is not None
    url = await house.desk.log_out(session, Visitor())
    assert url is not None
    assert url.startswith(f"{URL}/")
    assert (await at.issuer.refresh(refresh)).json()["error"] == "invalid_grant"
    with pytest.raises(SessionEnded):
        await at.who(house, cookie)


async def test_logging_out_does_not_wait_for_an_issuer_that_is_down(at: Housed) -> None:
    house = at.open()
    cookie = await at.log_in(house)
    at.clock.wait(700)
    at.wire.down = True
    session = await stored(at, house, cookie)
    assert await house.desk.log_out(session, Visitor()) is not None  # its address is known
    with pytest.raises(SessionEnded):
        await at.who(house, cookie)


def logout_token(at: Housed, header: dict[str, Any] | None = None, **claims: Any) -> str:
    now = int(at.clock().timestamp())
    given = {
        "iss": URL,
        "aud": "dashboard",
        "iat": now,
        "exp": now + 120,
        "jti": secrets.token_urlsafe(8),
        "sub": "otto",
        "events": {LOGOUT_EVENT: {}},
        **claims,
    }
    kept = {name: value for name, value in given.items() if value is not None}
    issuer = at.issuer.issuer
    head = {"alg": issuer.algorithm, "kid": issuer.key.kid, "typ": "logout+jwt", **(header or {})}
    return issuer.sign(kept, {name: value for name, value in head.items() if value is not None})


async def test_an_issuer_logs_a_person_out(at: Housed) -> None:
    house = at.open()
    otto, again, ada = [await at.log_in(house, name) for name in ("otto", "otto", "ada")]
    sid = (await stored(at, house, otto)).provider_session
    assert sid is not None
    word = logout_token(at, sid=sid)
    assert await house.desk.log_out_by_issuer(word, Visitor()) == 1
    with pytest.raises(LogoutTokenRefused, match="before"):
        await at.open().desk.log_out_by_issuer(word, Visitor())
    with pytest.raises(SessionEnded):
        await at.who(house, otto)
    assert (await at.who(house, again)).subject == "otto"
    assert await house.desk.log_out_by_issuer(logout_token(at), Visitor()) == 1
    with pytest.raises(SessionEnded):
        await at.who(house, again)
    assert (await at.who(house, ada)).subject == "ada"
    assert await house.desk.log_out_by_issuer(logout_token(at, sub="nobody"), Visitor()) == 0
    unusual: tuple[dict[str, Any], ...] = (
        {"exp": None},
        {"aud": ["dashboard"]},
        {"header": {"typ": None}},
    )
    for changes in unusual:
        assert await house.desk.log_out_by_issuer(logout_token(at, **changes), Visitor()) == 0


async def test_words_that_are_no_logout(at: Housed) -> None:
    house = at.open()
    cookie = await at.log_in(house)
    tokens = house.desk._safe.take(await stored(at, house, cookie))
    now = int(at.clock().timestamp())
    good = logout_token(at)
    words: list[Any] = [
        "",
        "x",
        "a.b.c",
        "é",
        "x" * 20_000,
        tokens.identity,
        tokens.access,
        good[:-6] + "AAAAAA",
        good.rpartition(".")[0] + ".",
    ]
    spoilt: tuple[dict[str, Any], ...] = (
        {"iss": "https://evil.test"},
        {"iss": None},
        {"aud": "another"},
        {"aud": None},
        {"aud": ["dashboard", "another"]},
        {"azp": "another"},
        {"iat": None},
        {"iat": now + 31},
        {"iat": "now"},
        {"exp": now - 31},
        {"exp": True},
        {"iat": now - 400, "exp": None},
        {"iat": now - 400},
        {"jti": None},
        {"jti": ""},
        {"sub": None},
        {"sub": 7},
        {"sub": "otto\n"},
        {"sid": ["x"]},
        {"events": None},
        {"events": []},
        {"events": {"another": {}}},
        {"events": {LOGOUT_EVENT: True}},
        {"nonce": "n"},
        {"header": {"typ": "at+jwt"}},
        {"header": {"kid": "another"}},
    )
    words += [logout_token(at, **changes) for changes in spoilt]
    for word in words:
        with pytest.raises(LogoutTokenRefused):
            await house.desk.log_out_by_issuer(word, Visitor())
    assert (await at.who(house, cookie)).subject == "otto"
