"""Logs, figures, the audit of refused callers, and the addresses of those behind proxies."""

from __future__ import annotations

import io
import json
import logging
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest

from app.domain.scopes import Scope
from app.http.records import record_refused_callers
from app.observability.log import configure_logging, logger
from app.observability.refused_callers import RefusedCallers
from tests.http.gateway import ADMIN, Gateway, gateway

pytestmark = pytest.mark.anyio

AT = datetime(2026, 11, 2, 10, 0, 30, tzinfo=UTC)


async def test_a_request_is_one_line_that_says_who_and_what(
    logged: io.StringIO, gate: Gateway
) -> None:
    answer = await gate.http.get(
        "/v1/engines/e1?", headers={**gate.auth(Scope.READ, subject="grace"), "traceparent": TRACE}
    )
    lines = [json.loads(line) for line in logged.getvalue().splitlines()]
    (line,) = [line for line in lines if line.get("route") == "/v1/engines/{engine}"]
    assert line["event"] == "request"
    assert line["request_id"] == answer.headers["x-request-id"]
    assert line["trace_id"] == TRACE.split("-")[1]
    assert (line["method"], line["status"], line["subject"]) == ("GET", 200, "grace")
    assert (line["client_id"], line["issuer"]) == ("console", gate.issuer.issuer)
    assert line["duration_ms"] > 0
    assert set(line) == {
        *("event", "level", "logger", "timestamp", "request_id", "trace_id", "method", "route"),
        *("status", "duration_ms", "source", "subject", "client_id", "issuer"),
    }


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def figures(gate: Gateway) -> dict[str, float]:
    answer = await gate.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for line in answer.text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


async def test_figures(gate: Gateway) -> None:
    gate.engine.progress = 1
    await gate.flush()
    await gate.http.get("/v1/engines")
    await gate.get("/v1/none")
    found = await figures(gate)
    engines = 'method="POST",route="/v1/engines"'
    assert found[f'chadburn_http_requests_total{{{engines},status="201"}}'] == 1
    unmatched = 'method="GET",route="unmatched"'
    assert found[f'chadburn_http_requests_total{{{unmatched},status="404"}}'] == 1
    assert found['chadburn_auth_refused_total{reason="TOKEN_MISSING"}'] == 1
    assert found['chadburn_engine_health{engine="e1",state="serving"}'] == 1
    assert found['chadburn_engine_health{engine="e1",state="unreachable"}'] == 0
    assert found['chadburn_engine_admission{engine="e1",state="open"}'] == 1
    assert found['chadburn_engine_weights{engine="e1",state="valid"}'] == 1
    assert found['chadburn_engine_revision{engine="e1"}'] >= 1
    assert found["chadburn_streams_open"] == 0
    assert found['chadburn_operations_queued{engine="e1"}'] == 0
    gate.engine.go.clear()
    await gate.order("pause", {"mode": "drain"})
    found = await figures(gate)
    assert sum(v for k, v in found.items() if k.startswith("chadburn_operations_open")) == 1
    for _ in range(2):
        await gate.order("flush-caches", {"caches": ["prefix"], "when_busy": "queue"})
    found = await figures(gate)
    assert found['chadburn_operations_queued{engine="e1"}'] == 2
    flushes = 'engine="e1",kind="flush_caches",state="succeeded"'
    assert found[f"chadburn_operations_ended_total{{{flushes}}}"] == 1
    assert not [name for name in found if re.search(r"[0-9a-f]{8}-[0-9a-f]{4}-", name)]


@pytest.mark.parametrize("style", ["json", "console"])
def test_of_a_failure_the_log_tells_the_kind_and_the_place(
    logged: io.StringIO, style: Literal["json", "console"]
) -> None:
    """Messages of libraries quote what they were given, so they stand in neither form."""
    configure_logging("debug", style, logged)
    try:
        raise ValueError("s3cret in a message") from OSError("s3cret in its cause")
    except ValueError:
        logger("chadburn.test").error("it_failed", exc_info=True)
        logging.getLogger("elsewhere").exception("so did this")
    said = logged.getvalue()
    assert "s3cret" not in said
    assert said.count("ValueError") == said.count("OSError") == 2
    places = re.findall(r"test_observability\.py:\d+ test_of_a_failure", said)
    assert len(places) == 2
    assert "Traceback" not in said


def test_a_record_that_cannot_be_written_is_not_told_at_length(
    logged: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logging("debug", "console", logged)
    try:
        raise ValueError("s3cret")
    except ValueError:
        logging.getLogger("elsewhere").exception("%d", "no number")
    assert logged.getvalue() == "a log record of elsewhere could not be written: TypeError\n"
    assert capfd.readouterr() == ("", "")


async def test_a_stranger_has_no_rows_written(gate: Gateway) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert (await gate.http.request(method, "/v1/nothing")).status_code == 404
    assert (await gate.http.post("/healthz")).status_code == 405
    rows = (await gate.get("/v1/audit")).json()["items"]
    assert "unmatched" not in {row["action"] for row in rows}
    assert all(row["principal"] for row in rows)


async def test_refused_callers_are_one_row_an_address_and_minute(gate: Gateway) -> None:
    for _ in range(5):
        await gate.http.get("/v1/engines")
    await gate.http.get("/v1/engines", headers={"Authorization": "Bearer x.y.z"})
    rooms = gate.rooms
    await record_refused_callers(rooms.ledger, rooms.refused_callers, rooms.clock, all_of_them=True)
    audit = (await gate.get("/v1/audit?action=authenticate")).json()["items"]
    assert len(audit) <= 2  # the minute may have turned in between
    assert sum(row["detail"]["calls"] for row in audit) == 6
    assert {row["source"] for row in audit} == {"127.0.0.1"}
    assert {row["outcome"] for row in audit} == {"denied"}
    reasons: dict[str, Any] = audit[-1]["detail"]["reasons"]
    assert reasons["TOKEN_MISSING"] >= 1


def test_minutes_are_handed_over_when_they_are_past() -> None:
    callers = RefusedCallers()
    callers.count(AT, "10.0.0.1", "TOKEN_MISSING")
    callers.count(AT + timedelta(seconds=20), "10.0.0.1", "TOKEN_EXPIRED")
    callers.count(AT + timedelta(seconds=40), "10.0.0.1", "TOKEN_MISSING")
    assert callers.take(AT) == ()
    (past,) = callers.take(AT + timedelta(minutes=1))
    assert past.reasons == {"TOKEN_MISSING": 1, "TOKEN_EXPIRED": 1}
    (rest,) = callers.take(None)
    assert rest.reasons == {"TOKEN_MISSING": 1}
    assert callers.take(None) == ()


def test_forged_addresses_do_not_make_it_grow() -> None:
    callers = RefusedCallers(most_addresses=3)
    for number in range(100):
        callers.count(AT, f"10.0.0.{number}", "TOKEN_MISSING")
    taken = {calls.source: calls.reasons["TOKEN_MISSING"] for calls in callers.take(None)}
    assert taken == {"10.0.0.0": 1, "10.0.0.1": 1, "10.0.0.2": 1, "other": 97}


@pytest.mark.parametrize(
    ("trusted", "source"), [((), "127.0.0.1"), (("127.0.0.1",), "203.0.113.9")]
)
async def test_a_proxy_is_believed_only_where_it_is_trusted(
    tmp_path: Path, trusted: tuple[str, ...], source: str
) -> None:
    async with gateway(tmp_path / "data", trusted_proxies=trusted) as gate:
        headers = {**gate.auth(Scope.READ), "X-Forwarded-For": "203.0.113.9"}
        await gate.http.post("/v1/engines", json={}, headers=headers)
        rows = (await gate.get("/v1/audit")).json()["items"]
        (denied,) = [row for row in rows if row["outcome"] == "denied"]
        assert denied["source"] == source


async def test_what_every_answer_carries(gate: Gateway) -> None:
    for path in ("/v1/engines", "/healthz", "/nothing", "/problems"):
        headers = (await gate.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert re.fullmatch(r"[0-9a-f-]{36}", headers["x-request-id"])
        assert "server" not in headers
    assert (await gate.get("/v1/engines")).headers["cache-control"] == "no-store"


async def test_the_metadata_of_the_protected_resource(tmp_path: Path) -> None:
    """RFC 9728: found without a token, at the root and behind the path of the resource."""
    public = "https://gw.example/chadburn"
    async with gateway(
        tmp_path / "data", public_url=public, allowed_hosts=("127.0.0.1",), registered=False
    ) as gate:
        base = f"http://127.0.0.1:{gate.port}"
        well_known = f"{base}/.well-known/oauth-protected-resource"
        challenge = (await gate.http.get(f"{base}/v1/me")).headers["www-authenticate"]
        where = "https://gw.example/.well-known/oauth-protected-resource/chadburn"
        assert f'resource_metadata="{where}"' in challenge
        for suffix, resource in (
            ("", public),
            ("/chadburn", public),
            ("/chadburn/v1", f"{public}/v1"),
        ):
            found = (await gate.http.get(f"{well_known}{suffix}")).json()
            assert found["resource"] == resource
            assert found["authorization_servers"] == [gate.issuer.issuer]
            assert found["bearer_methods_supported"] == ["header"]
            assert "admin:pause" in found["scopes_supported"]
            assert found["chadburn_audiences"] == {gate.issuer.issuer: ADMIN}
        assert (await gate.http.get(f"{well_known}/other")).status_code == 404
        answer = await gate.http.get(f"{base}/v1/me")
        assert answer.headers["strict-transport-security"].startswith("max-age=")
