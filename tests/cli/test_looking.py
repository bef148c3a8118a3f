"""Verbs that read: engines and operations."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.cli.conftest import Run
from tests.cli.scripted import Answer, Gateway, Seen, event, operation, stream

ENGINE: dict[str, Any] = {
    "id": "torch-0",
    "dialect": "openengine",
    "health": {"state": "serving"},
    "revision": 7,
    "facts": {"admission": "paused", "pause": {"mode": "drain", "epoch": 3}},
    "running_operation": None,
}
UNREAD = ENGINE | {"id": "new", "facts": None, "revision": None, "health": {"state": "unknown"}}


class TestEngines:
    def test_all_pages_make_one_table(self, at: Run, gateway: Gateway) -> None:
        gateway.then(Answer(200, {"items": [ENGINE], "next_page_token": "more"}))
        gateway.then(Answer(200, {"items": [UNREAD], "next_page_token": None}))
        ran = at("engines", "list", "--label", "tier=gold")
        assert ran.code == 0
        assert [line.split() for line in ran.out.splitlines()] == [
            ["ENGINE", "DIALECT", "HEALTH", "ADMISSION", "PAUSE", "REVISION", "RUNNING"],
            ["torch-0", "openengine", "serving", "paused", "drain", "epoch", "3", "r7", "-"],
            ["new", "openengine", "unknown", "-", "-", "-", "-"],
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


class TestOperations:
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
