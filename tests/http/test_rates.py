"""How often: the algorithm by its properties, and what callers meet of it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from app.domain.scopes import Scope
from app.http.middleware.context import MAX_SOURCE_CHARS
from app.http.rates import Meter, Rate, neighbourhood
from app.http.records import record_refused_callers
from tests.auth.conftest import Origin
from tests.auth.conftest import origin as origin
from tests.http.gateway import ADMIN, Gateway, gateway

pytestmark = pytest.mark.anyio

RATES = some.builds(
    Rate,
    per_s=some.floats(0.1, 1_000, allow_nan=False),
    burst=some.integers(1, 50),
)
GAPS = some.lists(some.floats(0, 20, allow_nan=False), max_size=80)


@given(rate=RATES, gaps=GAPS)
def test_in_no_span_is_there_more_than_the_burst_and_the_rate(
    rate: Rate, gaps: list[float]
) -> None:
    meter = Meter(rate)
    happened = [at for at in itertools.accumulate(gaps, initial=100.0) if not meter.take("k", at)]
    for first in range(len(happened)):
        for last in range(first, len(happened)):
            span = happened[last] - happened[first]
            assert last - first + 1 <= rate.burst + span * rate.per_s + 1e-6


@given(rate=RATES, count=some.integers(1, 100), start=some.floats(0, 1e6))
def test_who_keeps_to_the_rate_never_waits(rate: Rate, count: int, start: float) -> None:
    meter = Meter(rate)
    # A hair slower: sums of fractions are not exact.
    each_s = 1.000001 / rate.per_s
    for number in range(count):
        assert meter.take("k", start + number * each_s) < 1e-6


@given(rate=RATES, gaps=GAPS)
def test_who_waits_as_long_as_was_said_is_let_in_and_not_before(
    rate: Rate, gaps: list[float]
) -> None:
    meter, now = Meter(rate), 0.0
    for gap in gaps:
        now += gap
        wait_s = meter.take("k", now)
        assert wait_s >= 0
        if wait_s:
            if wait_s > 1e-9:  # less is lost beside the time it is added to
                assert meter.wait_s("k", now + wait_s * 0.99) > 0
            assert meter.wait_s("k", now + wait_s + 1e-6) == 0
            assert meter.wait_s("k", now) == wait_s, "what was refused uses up nothing"


@given(keys=some.lists(some.integers(0, 1_000), max_size=300))
def test_ever_new_keys_take_no_more_memory(keys: list[int]) -> None:
    meter = Meter(Rate(1, 2), most=10)
    for now, key in enumerate(keys):
        meter.take(key, now / 1_000)
        assert len(meter) <= 10
    assert not Meter(None).take("k", 0)


def test_the_one_that_was_quiet_for_longest_is_forgotten() -> None:
    meter = Meter(Rate(0.001, 1), most=2)
    meter.take("a", 0.0)
    meter.take("b", 1.0)
    assert meter.take("a", 2.0) > 0
    meter.take("c", 3.0)
    assert meter.take("a", 4.0) > 0
    assert meter.take("b", 5.0) == 0


@pytest.mark.parametrize(
    ("address", "counted_as"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("192.0.2.7:40123", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1::/48"),
        ("2001:db8:1:ffff::1", "2001:db8:1::/48"),
        ("[2001:db8:1:2::1]:443", "2001:db8:1::/48"),
        ("[::ffff:192.0.2.7]:443", "192.0.2.7"),
        ("fe80::1%eth0", "fe80::/48"),
        ("local", "local"),
        ("", ""),
        ("unknown", "unknown"),
    ],
)
def test_of_ipv6_a_network_is_one_address(address: str, counted_as: str) -> None:
    assert neighbourhood(address) == counted_as


async def test_beyond_so_many_refusals_they_are_429_and_what_is_good_gets_in(
    tmp_path: Path,
) -> None:
    bad = {"Authorization": "Bearer a.b.c"}
    async with gateway(tmp_path / "data", max_refusals_per_minute=5) as gate:
        codes = [(await gate.http.get("/v1/engines", headers=bad)).status_code for _ in range(8)]
        assert codes[:5] == [401] * 5
        assert codes[5:] == [429] * 3
        limited = await gate.http.get("/v1/engines")
        assert limited.json()["reason"] == "TOO_MANY_REFUSALS"
        assert 1 <= int(limited.headers["retry-after"]) <= 12
        assert "www-authenticate" not in limited.headers
        for path in ("/healthz", "/readyz"):
            assert (await gate.http.get(path)).status_code == 200
        assert (await gate.http.get("/metrics", headers=bad)).status_code == 429
        assert (await gate.get("/metrics")).status_code == 200
        assert (await gate.get("/v1/engines")).status_code == 200
        assert (await gate.flush())["state"] == "succeeded"
        rows = await folded(gate)
        (row,) = [row for row in rows if row["action"] == "authenticate"][:1]
        assert row["detail"]["calls"] >= 10
        assert (row["outcome"], row["principal"]) == ("denied", None)


async def folded(gate: Gateway) -> list[dict[str, Any]]:
    rooms = gate.rooms
    await record_refused_callers(rooms.ledger, rooms.refused_callers, rooms.clock, all_of_them=True)
    items: list[dict[str, Any]] = (await gate.get("/v1/audit?page_size=200")).json()["items"]
    return items


async def test_403s_are_counted_for_who_causes_them(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", max_refusals_per_minute=4) as gate:
        grace, ada = gate.auth(Scope.READ, subject="grace"), gate.auth(Scope.READ)
        path = "/v1/engines/e1/pause"
        codes = [(await gate.http.post(path, headers=grace)).status_code for _ in range(7)]
        assert codes == [403] * 4 + [429] * 3
        assert (await gate.http.post(path, headers=ada)).status_code == 403
        assert (await gate.http.get("/v1/engines", headers=grace)).status_code == 200
        rows = await folded(gate)
        mine = [row for row in rows if (row["principal"] or {}).get("subject") == "grace"]
        single = [row for row in mine if row["action"] == "pause"]
        assert [row["outcome"] for row in single] == ["denied"] * 4
        more = [row["detail"]["calls"] for row in mine if row["action"] == "call"]
        assert sum(more) == 3


async def test_orders_have_a_rate_for_each_caller_and_reads_have_none(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", max_changes_per_s=1) as gate:
        grace = gate.auth(subject="grace")
        answers = [await gate.http.post("/v1/engines/e1/pause", headers=grace) for _ in range(12)]
        limited = [answer for answer in answers if answer.status_code == 429]
        assert {answer.status_code for answer in answers} == {400, 429}
        assert answers[0].status_code == 400, "there is no key, and it was judged"
        problem = limited[-1].json()
        assert (problem["reason"], problem["retryable"]) == ("TOO_MANY_CHANGES", True)
        assert limited[-1].headers["retry-after"] == "1"
        reads = [await gate.http.get("/v1/engines", headers=grace) for _ in range(20)]
        assert {answer.status_code for answer in reads} == {200}
        assert (await gate.flush())["state"] == "succeeded", "somebody else's"


async def test_orders_have_a_rate_for_each_address_behind_trusted_proxies(tmp_path: Path) -> None:
    async with gateway(
        tmp_path / "data", max_changes_per_s_of_address=1, trusted_proxies=("127.0.0.1",)
    ) as gate:

        async def order(address: str, number: int) -> int:
            headers = {
                **gate.auth(subject=f"s{number}"),
                "X-Forwarded-For": f"203.0.113.9, {address}",
            }
            return (await gate.http.post("/v1/engines/e1/pause", headers=headers)).status_code

        codes = await asyncio.gather(*(order(f"2001:db8:7:{n:x}::1", n) for n in range(1, 20)))
        assert 429 in codes, "many callers, and one site"
        assert await order("192.0.2.1", 1) == 400
        assert await order("x" * 5_000, 1) == 400
        rows = (await gate.get("/v1/audit")).json()["items"]
        assert max(len(row["source"]) for row in rows if row["source"]) == MAX_SOURCE_CHARS


async def test_what_a_caller_says_of_its_address_counts_for_nothing(tmp_path: Path) -> None:
    """Nor does one of many tokens for one caller, nor what a proxy that is not named passes on."""
    async with gateway(tmp_path / "data", max_changes_per_s=1, max_refusals_per_minute=5) as gate:
        said = [f"192.0.2.{number}" for number in range(8)]
        forged = [
            {"X-Forwarded-For": one, "Forwarded": f"for={one}", "X-Real-IP": one} for one in said
        ]
        codes = [(await gate.http.get("/v1/engines", headers=one)).status_code for one in forged]
        assert codes == [401] * 5 + [429] * 3
        answers = [
            await gate.http.post(
                "/v1/engines/e1/pause",
                headers={**one, **gate.auth(subject="grace", ttl_s=600 + number)},
            )
            for number, one in enumerate(forged)
        ]
        assert {answer.status_code for answer in answers[:5]} == {400}
        assert 429 in {answer.status_code for answer in answers[5:]}
        rows = await folded(gate)
        assert {row["source"] for row in rows if row["action"] == "authenticate"} == {"127.0.0.1"}


class Asked:
    """A gateway whose issuer is asked about opaque tokens, and what it answers."""

    def __init__(self, gate: Gateway, origin: Origin) -> None:
        self.gate = gate
        self.origin = origin
        self.says()

    def says(self, held: asyncio.Event | None = None, **claims: Any) -> None:
        answer: dict[str, Any] = {"active": False}
        if claims:
            issuer = self.gate.issuer.issuer
            at = int(self.gate.rooms.clock.now().timestamp())
            answer = {
                "active": True,
                "iss": issuer,
                "aud": ADMIN,
                "client_id": "console",
                "exp": at + 600,
                "token_type": "Bearer",
                "scope": "admin:read",
                **claims,
            }
        self.origin.say("/introspect", json.dumps(answer).encode(), gate=held)

    @property
    def questions(self) -> int:
        return self.origin.requests["/introspect"]

    async def reading(
        self, token: str, address: str = "192.0.2.1", path: str = "/v1/engines"
    ) -> tuple[int, str | None]:
        headers = {"Authorization": f"Bearer {token}", "X-Forwarded-For": address}
        answer = await self.gate.http.get(path, headers=headers)
        return answer.status_code, answer.json()["reason"] if answer.is_error else None


@asynccontextmanager
async def asked(tmp_path: Path, origin: Origin, **changes: Any) -> AsyncIterator[Asked]:
    origin.say("/introspect", b'{"active": false}')
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    introspection = {
        "client_id": "gateway",
        "client_secret_file": secret,
        "endpoint": f"{origin.url}/introspect",
    }
    async with gateway(
        tmp_path / "data",
        trust={"introspection": introspection},
        trusted_proxies=("127.0.0.1",),
        **changes,
    ) as gate:
        await until(lambda: origin.requests["/introspect"])  # to see whether it can be asked
        yield Asked(gate, origin)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


async def test_the_issuer_is_not_asked_about_a_flood_of_guesses(
    tmp_path: Path, origin: Origin
) -> None:
    async with asked(tmp_path, origin, max_refusals_per_minute=6) as there:
        there.says(sub="ops")
        assert await there.reading("good") == (200, None)
        there.says()
        before = there.questions
        found = [await there.reading(f"guess{n}") for n in range(9)]
        assert found[:5] == [(401, "TOKEN_INACTIVE")] * 5
        assert found[5:] == [(429, "TOO_MANY_NEW_TOKENS")] * 4
        assert await there.reading("guess", path="/metrics") == (429, "TOO_MANY_NEW_TOKENS")
        assert there.questions == before + 5
        assert await there.reading("good") == (200, None), "it was seen before"
        assert await there.reading(there.gate.token(Scope.READ)) == (200, None), "nobody is asked"
        assert await there.reading("guess", "198.51.100.1") == (401, "TOKEN_INACTIVE")
        rows = [row for row in await folded(there.gate) if row["action"] == "authenticate"]
        reasons = {row["source"]: row["detail"]["reasons"] for row in rows}
        assert reasons["192.0.2.1"] == {"TOKEN_INACTIVE": 5, "TOO_MANY_NEW_TOKENS": 5}


async def test_many_calls_with_one_new_token_are_one_question(
    tmp_path: Path, origin: Origin
) -> None:
    async with asked(tmp_path, origin, max_refusals_per_minute=2) as there:
        held = asyncio.Event()
        there.says(held, sub="ops")
        before = there.questions
        calls = [asyncio.create_task(there.reading("new")) for _ in range(30)]
        await until(lambda: there.questions > before)
        held.set()
        assert await asyncio.gather(*calls) == [(200, None)] * 30
        assert there.questions == before + 1


async def test_one_address_does_not_fill_the_places_of_an_issuer_that_is_slow(
    tmp_path: Path, origin: Origin
) -> None:
    async with asked(tmp_path, origin, max_refusals_per_minute=600) as there:
        held = asyncio.Event()
        there.says(held)
        before = there.questions
        site = [f"2001:db8:7:{n:x}::1" for n in range(40)]
        flood = [
            asyncio.create_task(there.reading(f"guess{n}", address))
            for n, address in enumerate(site)
        ]
        await until(lambda: sum(one.done() for one in flood) >= 32)
        await until(lambda: there.questions >= before + 8)
        refused = [one.result() for one in flood if one.done()]
        assert refused == [(429, "TOO_MANY_NEW_TOKENS")] * 32
        other = asyncio.create_task(there.reading("other", "198.51.100.1"))
        await until(lambda: there.questions >= before + 9)
        assert await there.reading(there.gate.token(Scope.READ), site[0]) == (200, None)
        held.set()
        assert await other == (401, "TOKEN_INACTIVE")
        assert sorted(await asyncio.gather(*flood))[:8] == [(401, "TOKEN_INACTIVE")] * 8
        assert (await there.reading("later", site[0]))[0] == 401, "the places are free again"


async def test_a_trainer_that_flushes_ten_times_a_second_is_within_the_defaults() -> None:
    from app.settings import Settings

    settings = Settings()
    meter = Meter(Rate(settings.max_changes_per_s, settings.max_changes_per_s * 5))
    hour = timedelta(hours=1).total_seconds()
    assert not any(meter.take("trainer", n / 10) for n in range(int(hour * 10)))
