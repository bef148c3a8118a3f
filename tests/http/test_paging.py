"""Lists: pages that neither skip nor repeat, filters, exports."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.domain.kinds import OperationKind, OperationState
from app.domain.operation import Actor, Operation
from app.ledger.values import AuditEntry
from tests.http.gateway import Gateway, gateway

pytestmark = pytest.mark.anyio


async def fill(gate: Gateway, count: int, *, reason: str | None = None) -> list[str]:
    """So many abort orders straight into the ledger, as many gateways might have left them."""
    ids = []
    for _ in range(count):
        now = datetime.now(UTC)
        operation = Operation(
            id=gate.rooms.new_id(),
            engine_id="e1",
            kind=OperationKind.ABORT_REQUESTS,
            state=OperationState.ACCEPTED,
            request={"all": True},
            actor=Actor("https://issuer.example", "filler", "console"),
            created_at=now,
            reason=reason,
        )
        entry = AuditEntry(at=now, action="abort_requests", outcome="accepted")
        await gate.rooms.ledger.operations.accept(operation, key=None, audit=entry)
        ids.append(operation.id)
    return ids


async def test_a_walk_sees_each_once_while_others_come_in(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data") as gate:
        known = await fill(gate, 55)
        for size in (1, 2, 7, 50):
            seen: list[str] = []
            url: str | None = f"/v1/operations?page_size={size}&principal=filler"
            while url is not None:
                page = await gate.get(url)
                items = page.json()["items"]
                assert len(items) <= size
                seen += [item["id"] for item in items]
                url = next_url(page)
                assert (page.json()["next_page_token"] is None) is (url is None)
                if len(seen) % 5 == 0:
                    await fill(gate, 1)
            assert [i for i in reversed(seen) if i in known] == known
            assert len(set(seen)) == len(seen)
            known = list(reversed(await everything(gate)))


async def everything(gate: Gateway) -> list[str]:
    page = await gate.get("/v1/operations?page_size=1000&principal=filler")
    return [item["id"] for item in page.json()["items"]]


def next_url(page: httpx2.Response) -> str | None:
    link = page.headers.get("link")
    if link is None:
        return None
    target, _, relation = str(link).partition(">; ")
    assert relation == 'rel="next"'
    return target.removeprefix("<")


async def test_engines_are_walked_by_id(gate: Gateway) -> None:
    for number in range(9):
        assert (await gate.register(f"n{number}")).status_code == 201
    for size in (1, 2, 7, 50):
        seen: list[str] = []
        url: str | None = f"/v1/engines?page_size={size}"
        while url is not None:
            page = await gate.get(url)
            seen += [item["id"] for item in page.json()["items"]]
            url = next_url(page)
        assert seen == ["e1", *(f"n{number}" for number in range(9))]


async def test_a_token_is_good_for_its_own_filters_and_place(gate: Gateway) -> None:
    await fill(gate, 3)
    first = (await gate.get("/v1/operations?page_size=1&principal=filler")).json()
    token = first["next_page_token"]

    async def reason(url: str) -> Any:
        answer = await gate.get(url)
        return answer.status_code, answer.json().get("reason")

    good = f"/v1/operations?principal=filler&page_token={token}"
    assert (await reason(good))[0] == 200
    assert (await reason(f"{good}&page_size=2"))[0] == 200
    refused = (400, "PAGE_TOKEN_INVALID")
    assert await reason(f"/v1/operations?page_token={token}") == refused
    assert await reason(f"/v1/operations?principal=other&page_token={token}") == refused
    assert await reason(f"/v1/engines?page_token={token}") == refused
    assert await reason(f"/v1/audit?page_token={token}") == refused
    for broken in ("", "x", "W10", "WzEsMl0", token[:-2], token + "A", "%00", "é"):
        assert await reason(f"/v1/operations?principal=filler&page_token={broken}") == refused


async def test_filters_and_the_largest_page(gate: Gateway) -> None:
    ours = await fill(gate, 2)
    flushed = (await gate.flush())["id"]

    async def ids(query: str) -> list[str]:
        answer = await gate.get(f"/v1/operations?{query}")
        assert answer.status_code == 200, answer.text
        return [item["id"] for item in answer.json()["items"]]

    assert await ids("kind=flush_caches") == [flushed]
    assert await ids("kind=flush_caches&kind=pause&state=succeeded") == [flushed]
    assert await ids("kind=abort_requests&principal=filler") == ours[::-1]
    assert await ids("engine=none") == []
    assert await ids("since=2999-01-01T00:00:00Z") == []
    assert await ids("principal=ada") == [flushed]
    assert len(await ids("page_size=99999999999999999999")) == 3
    key = (await gate.get(f"/v1/operations/{flushed}")).json()["idempotency_key"]
    assert await ids(f"idempotency_key={key}") == [flushed]
    assert await ids(f"idempotency_key={key[:-1]}") == []
    assert await ids(f"idempotency_key={key}&engine=none") == []
    table = await gate.get(f"/v1/operations?idempotency_key={key}", Accept="text/csv")
    assert [row["id"] for row in csv.DictReader(io.StringIO(table.text, newline=""))] == [flushed]


async def test_csv_has_every_row_and_no_formula(gate: Gateway) -> None:
    for number in range(600):
        entry = AuditEntry(at=datetime.now(UTC), action="test", outcome=f"row {number}")
        await gate.rooms.ledger.audit.append(entry)
    for reason in ("=1+2", "+x", "-x", "@x", 'a,b\n"c"', "|x", "ordinary"):
        await fill(gate, 1, reason=reason)
    audit = await gate.get("/v1/audit?action=test", Accept="text/csv;q=0.9, */*;q=0.1")
    assert audit.headers["content-type"] == "text/csv; charset=utf-8"
    assert "attachment" in audit.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(audit.text, newline="")))
    assert [row["outcome"] for row in rows] == [f"row {n}" for n in reversed(range(600))]
    operations = await gate.get("/v1/operations", Accept="text/csv")
    rows = list(csv.DictReader(io.StringIO(operations.text, newline="")))
    assert [row["reason"] for row in reversed(rows)] == [
        *("'=1+2", "'+x", "'-x", "'@x", 'a,b\n"c"', "'|x", "ordinary")
    ]
    assert rows[0]["principal.subject"] == "filler"
