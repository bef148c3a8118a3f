"""Verbs that read: engines and operations."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.cli.conftest import Run
from tests.cli.scripted import Answer, Gateway, Seen, event, operation, problem, stream

ENGINE: dict[str, Any] = {
    "id": "torch-0",
    "dialect": "openengine",
    "health": {"state": "serving"},
    "revision": 7,
    "facts": {"admission": "paused", "pause": {"mode": "drain", "epoch": 3}},
    "running_operation": None,
}
UNREAD = ENGINE | {
    "id": "new",
    "facts": None,
    "revision": None,
    "health": {"state": "unknown"},
    "frozen": {"reason": "holidays", "until": "2026-03-01T12:00:00Z"},
}


class TestEngines:
    def test_all_pages_make_one_table(self, at: Run, gateway: Gateway) -> None:
        gateway.then(Answer(200, {"items": [ENGINE], "next_page_token": "more"}))
        gateway.then(Answer(200, {"items": [UNREAD], "next_page_token": None}))
        ran = at("engines", "list", "--label", "tier=gold")
        assert ran.code == 0
        assert [line.split() for line in ran.out.splitlines()] == [
            ["ENGINE", "DIALECT", "HEALTH", "ADMISSION", "PAUSE", "REVISION", "RUNNING", "FROZEN"],
            ["torch-0", "openengine", "serving", "paused", "drain", "epoch", "3", "r7", "-", "-"],
            ["new", "openengine", "unknown", "-", "-", "-", "-", "2026-03-01T12:00:00Z"],
        ]
        assert gateway.seen[0].path == "/v1/engines?label=tier%3Dgold"
        assert "page_token=more" in gateway.seen[1].path

    def test_one_is_shown_whole(self, at: Run, gateway: Gateway) -> None:
        gateway.then(Answer(200, ENGINE))
        assert json.loads(at("engines", "get", "torch-0").out) == ENGINE

    def test_registering_takes_no_key(self, at: Run, gateway: Gateway) -> None:
        gateway.then(Answer(201, ENGINE))
        ran = at(
            "engines", "register", "torch-0", "--admin", "10.0.0.1:1", "--control", "10.0.0.1:2",
            "--credential", "prod", "--label", "tier=gold", "--label", "zone=",
        )  # fmt: skip
        assert ran.code == 0
        (seen,) = gateway.seen
        assert seen.body == {
            "id": "torch-0",
            "dialect": "openengine",
            "members": [{"rank": 0, "admin": "10.0.0.1:1", "control": "10.0.0.1:2"}],
            "labels": {"tier": "gold", "zone": ""},
            "tls": {"credential": "prod"},
        }
        assert "idempotency-key" not in seen.headers

    def test_an_engine_is_read_where_it_takes_orders_unless_said_otherwise(
        self, at: Run, gateway: Gateway
    ) -> None:
        gateway.then(Answer(201, ENGINE))
        assert at("engines", "register", "torch-0", "--admin", "unix:/run/engine").code == 0
        (member,) = gateway.seen[0].body["members"]
        assert member == {"rank": 0, "admin": "unix:/run/engine", "control": "unix:/run/engine"}

    def test_members_have_their_ranks_by_their_order(self, at: Run, gateway: Gateway) -> None:
        gateway.then(Answer(201, ENGINE))
        members = ("--admin", "10.0.0.1:1", "--admin", "10.0.0.2:1")
        assert at("engines", "register", "llm", "--dialect", "vllm", *members).code == 0
        assert [(m["rank"], m["admin"]) for m in gateway.seen[0].body["members"]] == [
            (0, "10.0.0.1:1"),
            (1, "10.0.0.2:1"),
        ]

    def test_what_is_not_named_stays(self, at: Run, gateway: Gateway) -> None:
        tls = {"server_name": "llm.example", "credential": None}
        known = ENGINE | {"generation": 4, "tls": tls, "labels": {"tier": "gold", "zone": "a"}}
        gateway.then(Answer(200, known)).then(Answer(200, known | {"generation": 5}))
        ran = at(
            "engines", "update", "torch-0", "--credential", "prod", "--label", "zone=b",
            "--without-label", "tier",
        )  # fmt: skip
        assert (ran.code, ran.out) == (0, "torch-0  changed  generation 5\n")
        seen = gateway.seen[1]
        assert (seen.method, seen.path) == ("PATCH", "/v1/engines/torch-0")
        assert seen.headers["if-match"] == '"g4"'
        assert seen.body == {"tls": tls | {"credential": "prod"}, "labels": {"zone": "b"}}
        gateway.then(Answer(200, known)).then(Answer(200, known))
        moved = ("--admin", "10.0.0.1:1", "--server-name", "")
        assert at("engines", "update", "torch-0", *moved).code == 0
        assert gateway.seen[3].body == {
            "members": [{"rank": 0, "admin": "10.0.0.1:1", "control": "10.0.0.1:1"}],
            "tls": {"server_name": None, "credential": None},
        }

    def test_a_change_of_nothing_is_none(self, at: Run, gateway: Gateway) -> None:
        assert at("engines", "update", "torch-0").code == 2
        assert at("engines", "update", "torch-0", "--control", "10.0.0.1:2").code == 2
        assert gateway.seen == []

    def test_freezing_and_thawing(self, at: Run, gateway: Gateway) -> None:
        frozen = ENGINE | {"frozen": {"reason": "holidays", "until": "2026-03-01T12:00:00Z"}}
        gateway.then(Answer(200, frozen)).then(Answer(200, frozen)).then(Answer(204))
        moment = "2026-03-01T12:00:00Z"
        ran = at("engines", "freeze", "torch-0", "--reason", "holidays", "--until", moment)
        assert (ran.code, ran.out) == (0, "torch-0  frozen until 2026-03-01T12:00:00Z\n")
        before = datetime.now(UTC)
        ran = at("engines", "freeze", "torch-0", "--reason", "x", "--minutes", "90", "--json")
        assert json.loads(ran.out) == frozen
        ran = at("engines", "thaw", "torch-0", "--reason", "back early")
        assert (ran.code, ran.out) == (0, "torch-0  thawed\n")
        put, again, thaw = gateway.seen
        assert (put.method, put.path) == ("PUT", "/v1/engines/torch-0/freeze")
        assert put.body == {"reason": "holidays", "until": moment}
        until = datetime.fromisoformat(again.body["until"])
        assert before <= until - timedelta(minutes=90) <= datetime.now(UTC)
        assert (thaw.method, thaw.path) == (
            "DELETE",
            "/v1/engines/torch-0/freeze?reason=back+early",
        )

    def test_a_freeze_says_when_it_ends(self, at: Run, gateway: Gateway) -> None:
        assert at("engines", "freeze", "torch-0", "--reason", "x").code == 2
        both = ("--until", "2026-03-01T12:00:00Z", "--minutes", "1")
        assert at("engines", "freeze", "torch-0", "--reason", "x", *both).code == 2
        assert gateway.seen == []

    def test_a_thaw_that_is_refused(self, at: Run, gateway: Gateway) -> None:
        gateway.then(problem(404, title="No such engine", reason="ENGINE_NOT_FOUND"))
        ran = at("engines", "thaw", "torch-0")
        assert (ran.code, "ENGINE_NOT_FOUND" in ran.err) == (6, True)


class TestOperations:
    def test_settling(self, at: Run, gateway: Gateway) -> None:
        """The code says that it is settled, not what was stated."""
        failed = operation("failed", verification="settled")
        gateway.then(Answer(200, failed))
        given = ("ops", "settle", "op-1", "--outcome", "failed", "--reason", "I looked")
        ran = at(*given)
        assert ran.code == 0
        assert "settled" in ran.out
        assert json.loads(at(*given, "--message", "it burnt", "--json").out) == failed
        first, second = gateway.seen
        assert (first.method, first.path) == ("POST", "/v1/operations/op-1/settle")
        assert first.body == {"outcome": "failed", "reason": "I looked"}
        assert second.body == {**first.body, "message": "it burnt"}
        assert "idempotency-key" not in first.headers

    def test_what_is_stated_is_an_end_and_has_a_reason(self, at: Run, gateway: Gateway) -> None:
        assert at("ops", "settle", "op-1", "--outcome", "failed").code == 2
        assert at("ops", "settle", "op-1", "--reason", "x", "--outcome", "running").code == 2
        assert gateway.seen == []

    def test_an_outcome_that_is_not_in_doubt(self, at: Run, gateway: Gateway) -> None:
        gateway.then(problem(409, title="The outcome is not in doubt", reason="NOT_RECONCILING"))
        ran = at("ops", "settle", "op-1", "--reason", "x", "--outcome", "failed")
        assert (ran.code, "NOT_RECONCILING" in ran.err) == (6, True)

    def test_what_is_stuck_can_be_listed(self, at: Run, gateway: Gateway) -> None:
        gateway.then(Answer(200, {"items": [operation("reconciling")], "next_page_token": None}))
        assert "reconciling" in at("ops", "list", "--state", "reconciling").out
        assert gateway.seen[0].path == "/v1/operations?state=reconciling&page_size=50"

    def test_an_order_is_found_by_its_key(self, at: Run, gateway: Gateway) -> None:
        gateway.then(Answer(200, {"items": [operation("succeeded")], "next_page_token": None}))
        assert "op-1" in at("ops", "list", "--key", "noon 1").out
        assert gateway.seen[0].path == "/v1/operations?idempotency_key=noon+1&page_size=50"

    def test_no_more_pages_are_read_than_are_wanted(self, at: Run, gateway: Gateway) -> None:
        items = [operation("succeeded", id=f"op-{n}") for n in range(3)]
        gateway.then(Answer(200, {"items": items, "next_page_token": "more"}))
        ran = at("ops", "list", "--engine", "torch-0", "--state", "succeeded", "--limit", "2")
        assert ran.code == 0
        assert ["op-0" in ran.out, "op-1" in ran.out, "op-2" in ran.out] == [True, True, False]
        assert gateway.seen[0].path == ("/v1/operations?engine=torch-0&state=succeeded&page_size=2")
        assert len(gateway.seen) == 1

    def test_the_code_of_a_read_tells_the_outcome(self, at: Run, gateway: Gateway) -> None:
        for state, code in [("running", 0), ("reconciling", 5), ("failed", 3), ("cancelled", 4)]:
            gateway.answers.clear()
            gateway.then(Answer(200, operation(state)))
            assert at("ops", "get", "op-1").code == code

    def test_watching_tells_every_event_from_the_first(self, at: Run, gateway: Gateway) -> None:
        gateway.then(
            stream(event(3, "accepted", 1, {"kind": "pause"}), event(5, "failed", 2, {}))
        ).then(Answer(200, operation("failed")))
        ran = at("ops", "watch", "op-1", "--json")
        assert ran.code == 3
        told = [json.loads(line) for line in ran.out.splitlines()]
        assert [(one["sequence"], one["type"]) for one in told] == [(1, "accepted"), (2, "failed")]

    def test_a_cancellation_can_be_waited_for(self, at: Run, gateway: Gateway) -> None:
        def answer(seen: Seen) -> Answer:
            if seen.method == "POST":
                return Answer(202, operation("cancelling"))
            if seen.path.endswith("/events"):
                return stream(event(5, "cancelled", 2, {"message": "as asked"}))
            return Answer(200, operation("cancelled"))

        gateway.then(answer)
        assert at("ops", "cancel", "op-1", "--reason", "wrong engine", "--wait").code == 4
        assert gateway.seen[0].body == {"reason": "wrong engine"}


def test_an_order_is_given_without_what_serving_needs() -> None:
    """A verb answers at once and works where the extras are not installed."""
    heavy = ["torch", "grpc", "fastapi", "sqlalchemy", "pydantic", "tokenizers"]
    code = f"import sys, app.cli; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout.strip() == "[]"
