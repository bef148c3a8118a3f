"""Order verbs: what is sent, what is printed, and with which code they end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.scripted import Answer, Gateway, Seen, event, operation, problem, stream

DRAIN = ("pause", "torch-0", "--mode", "drain")
UPDATE = ("update-weights", "torch-0", "--weight-version", "v8")
SUCCEEDED = event(9, "completed", 2, {"result": {"pause_epoch": 3}})


def accepted(seen: Seen) -> Answer:
    return Answer(202, operation())


class TestWhatIsSent:
    def test_a_pause(self, at: Run, gateway: Gateway) -> None:
        gateway.then(accepted)
        ran = at(
            *DRAIN, "--new-requests", "hold", "--hold-limit-ms", "900", "--reason", "new weights",
            "--deadline-ms", "5000", "--key", "k-1", "--if-revision", "7", "--queue",
        )  # fmt: skip
        assert ran.code == 0, ran.err
        (seen,) = gateway.seen
        assert (seen.method, seen.path) == ("POST", "/v1/engines/torch-0/pause")
        assert seen.body == {
            "mode": "drain",
            "new_requests": "hold",
            "hold_limit_ms": 900,
            "reason": "new weights",
            "deadline_ms": 5000,
            "when_busy": "queue",
        }
        assert seen.headers["authorization"] == "Bearer t0k3n"
        assert seen.headers["idempotency-key"] == "k-1"
        assert seen.headers["if-match"] == '"r7"'

    @pytest.mark.parametrize(
        ("arguments", "path", "body"),
        [
            (("flush", "e"), "flush-caches", {"caches": ["prefix"]}),
            (
                ("flush", "e", "--cache", "encoder", "--cache", "prefix"),
                "flush-caches",
                {"caches": ["encoder", "prefix"]},
            ),
            (("abort", "e", "r-1", "r-2"), "abort-requests", {"request_ids": ["r-1", "r-2"]}),
            (("abort", "e", "--all"), "abort-requests", {"all": True}),
            (("shutdown", "e"), "shutdown", {}),
            (("resume", "e", "--pause-epoch", "3"), "resume", {"pause_epoch": 3}),
            (
                (
                    *("release", "e", "--resource", "kv_cache", "--resource", "weights"),
                    *("--content", "discard", "--drain", "wait"),
                ),
                "release-resources",
                {"resources": ["kv_cache", "weights"], "content": "discard", "drain": "wait"},
            ),
            (
                ("restore", "e", "--resource", "kv_cache", "--release-epoch", "2"),
                "restore-resources",
                {"resources": ["kv_cache"], "release_epoch": 2},
            ),
            (
                ("profile", "start", "e", "--steps", "5", "--with-stack"),
                "profiles",
                {"profiler": "torch", "steps": 5, "with_stack": True},
            ),
            (
                ("profile", "start", "e", "--profiler", "memory"),
                "profiles",
                {"profiler": "memory"},
            ),
            (
                (
                    *("reconfigure", "e", "--drain", "abort", "--role", "decode"),
                    *("--tensor-parallel-size", "2", "--max-batched-tokens", "512"),
                ),
                "reconfigure",
                {
                    "role": "decode",
                    "tensor_parallel_size": 2,
                    "max_batched_tokens": 512,
                    "drain": "abort",
                },
            ),
        ],
    )
    def test_the_others(
        self, at: Run, gateway: Gateway, arguments: tuple[str, ...], path: str, body: Any
    ) -> None:
        gateway.then(accepted)
        assert at(*arguments).code == 0
        (seen,) = gateway.seen
        assert (seen.path, seen.body) == (f"/v1/engines/e/{path}", body)
        assert "if-match" not in seen.headers

    def test_adapters(self, at: Run, gateway: Gateway) -> None:
        gateway.then(accepted)
        assert at("lora", "load", "e", "org/sql", "--path", "/l/sql", "--id", "3").code == 0
        assert at("lora", "unload", "e", "org/sql x", "--reason", "old").code == 0
        load, unload = gateway.seen
        assert (load.method, load.path) == ("POST", "/v1/engines/e/loras")
        assert load.body == {"name": "org/sql", "path": "/l/sql", "id": 3}
        assert (unload.method, unload.body) == ("DELETE", {"reason": "old"})
        assert unload.path == "/v1/engines/e/loras/org/sql%20x"

    def test_an_update_in_pieces(self, at: Run, gateway: Gateway, tmp_path: Path) -> None:
        gateway.then(accepted)
        chunk = {"index": 1, "ipc": {"tensors": [], "handles": []}}
        (tmp_path / "chunk.json").write_text(json.dumps(chunk))
        go_on = ("continue-update", "e", "--session", "s-1")
        said: list[tuple[tuple[str, ...], Any]] = [
            (
                ("--index", "0", "--file", "a", "--file", "b"),
                {"chunk": {"index": 0, "disk": {"files": ["a", "b"]}}},
            ),
            (("--chunk", str(tmp_path / "chunk.json")), {"chunk": chunk}),
            (("--commit", "2"), {"commit": {"chunks": 2}}),
            (("--abort",), {"abort": {}}),
        ]
        for arguments, _ in said:
            assert at(*go_on, *arguments).code == 0
        assert [(seen.path, seen.body) for seen in gateway.seen] == [
            (
                "/v1/engines/e/update-weights",
                {"source": {"session": {"session_id": "s-1", **stage}}},
            )
            for _, stage in said
        ]

    def test_an_update_of_weights(self, at: Run, gateway: Gateway, tmp_path: Path) -> None:
        gateway.then(accepted)
        update = ("update-weights", "e", "--weight-version", "v8")
        assert at(*update, "--disk", "/models/v8", "--pause", "drain").code == 0
        source = {"distributed": {"backend": "gloo"}}
        (tmp_path / "source.json").write_text(json.dumps(source))
        ran = at(
            *update, "--source", str(tmp_path / "source.json"), "--under-pause",
            "--pause-epoch", "3", "--cache-policy", "keep", "--component", "draft",
            "--check-finite",
        )  # fmt: skip
        assert ran.code == 0, ran.err
        first, second = gateway.seen
        assert first.path == second.path == "/v1/engines/e/update-weights"
        assert first.body == {
            "source": {"disk": {"path": "/models/v8"}},
            "weight_version": "v8",
            "cache_policy": "flush",
            "pause": {"mode": "drain"},
        }
        assert second.body == {
            "source": source,
            "weight_version": "v8",
            "cache_policy": "keep",
            "under_pause": {"pause_epoch": 3},
            "components": ["draft"],
            "check_finite": True,
        }

    def test_each_order_has_a_new_key(self, at: Run, gateway: Gateway) -> None:
        gateway.then(accepted)
        at(*DRAIN)
        at(*DRAIN)
        first, second = (seen.headers["idempotency-key"] for seen in gateway.seen)
        assert first != second

    def test_a_dry_run_needs_no_key_and_shows_the_plan(self, at: Run, gateway: Gateway) -> None:
        gateway.then(Answer(200, {"would": "pause"}))
        ran = at(*DRAIN, "--dry-run")
        assert (ran.code, json.loads(ran.out)) == (0, {"would": "pause"})
        (seen,) = gateway.seen
        assert seen.body["dry_run"] is True
        assert "idempotency-key" not in seen.headers


class TestResume:
    def engine(self, pause: Any) -> Answer:
        return Answer(200, {"id": "torch-0", "revision": 7, "facts": {"pause": pause}})

    def test_it_lifts_the_pause_it_has_read_and_no_other(self, at: Run, gateway: Gateway) -> None:
        gateway.then(self.engine({"mode": "drain", "epoch": 3, "by": "op-0"})).then(accepted)
        ran = at("resume", "torch-0")
        assert ran.code == 0
        assert "pause 3 (drain, by op-0) at revision 7" in ran.err
        assert gateway.seen[1].body == {"pause_epoch": 3}
        assert gateway.seen[1].headers["if-match"] == '"r7"'

    def test_there_is_nothing_to_lift(self, at: Run, gateway: Gateway) -> None:
        gateway.then(self.engine(None))
        ran = at("resume", "torch-0")
        assert (ran.code, len(gateway.seen)) == (6, 1)
        assert "not paused" in ran.err


class TestRestore:
    def engine(self, *released: str, epoch: int = 2) -> Answer:
        facts = {"released": list(released), "release_epoch": epoch}
        return Answer(200, {"id": "torch-0", "revision": 7, "facts": facts})

    @pytest.mark.parametrize(
        ("given", "resources"), [((), ["kv_cache", "weights"]), (("weights",), ["weights"])]
    )
    def test_it_restores_what_it_has_read_to_be_released(
        self, at: Run, gateway: Gateway, given: tuple[str, ...], resources: list[str]
    ) -> None:
        gateway.then(self.engine("kv_cache", "weights")).then(accepted)
        ran = at("restore", "torch-0", *(f"--resource={name}" for name in given))
        assert ran.code == 0
        assert f"restoring {', '.join(resources)} of release 2 at revision 7" in ran.err
        assert gateway.seen[1].body == {"resources": resources, "release_epoch": 2}
        assert gateway.seen[1].headers["if-match"] == '"r7"'

    def test_there_is_nothing_to_restore(self, at: Run, gateway: Gateway) -> None:
        gateway.then(self.engine())
        ran = at("restore", "torch-0")
        assert (ran.code, len(gateway.seen)) == (6, 1)
        assert "nothing of engine torch-0 is released" in ran.err


class TestOutcome:
    @pytest.mark.parametrize(
        ("state", "code", "words"),
        [
            ("succeeded", 0, "succeeded  pause_epoch=3  changed=true  r8  op-1"),
            ("failed", 3, "failed  ENGINE_RESTARTED: the engine began anew  effect unknown"),
            ("cancelled", 4, "cancelled"),
        ],
    )
    def test_the_end_decides_the_code(
        self, at: Run, gateway: Gateway, state: str, code: int, words: str
    ) -> None:
        gateway.then(accepted).then(stream(SUCCEEDED)).then(Answer(200, operation(state)))
        ran = at(*DRAIN, "--wait")
        assert ran.code == code
        assert words in ran.out

    def test_the_way_there_is_told_on_stderr(self, at: Run, gateway: Gateway) -> None:
        progress = {"phase": "draining", "done": 1, "total": 4, "unit": "requests"}
        gateway.then(accepted).then(stream(event(8, "progress", 1, progress), SUCCEEDED)).then(
            Answer(200, operation("succeeded"))
        )
        ran = at(*DRAIN, "--wait")
        assert "#1   progress    draining 1/4 requests" in ran.err
        assert "completed" in ran.err
        assert ran.out.count("\n") == 1

    def test_json_holds_the_operation_and_nothing_else(self, at: Run, gateway: Gateway) -> None:
        ended = operation("succeeded")
        gateway.then(accepted).then(stream(SUCCEEDED)).then(Answer(200, ended))
        ran = at(*DRAIN, "--wait", "--json")
        assert (json.loads(ran.out), ran.err) == (ended, "")

    def test_an_outcome_that_stays_unknown_is_not_waited_for_ever(
        self, at: Run, gateway: Gateway
    ) -> None:
        def answer(seen: Seen) -> Answer:
            if seen.path.endswith("/events"):
                return stream()
            return Answer(200, operation("reconciling"))

        gateway.then(accepted).then(answer)
        ran = at(*DRAIN, "--wait", "--timeout", "0.7")
        assert ran.code == 5
        assert "it is still reconciling after 0.7 s; the operation goes on" in ran.err
        assert "chadburn ops watch op-1" in ran.err

    def test_a_replayed_order_that_has_ended_is_not_followed(
        self, at: Run, gateway: Gateway
    ) -> None:
        gateway.then(Answer(202, operation("failed")))
        assert at(*DRAIN, "--wait", "--key", "k").code == 3
        assert len(gateway.seen) == 1

    def test_what_could_not_be_verified_is_said(self, at: Run, gateway: Gateway) -> None:
        gateway.then(
            Answer(
                202,
                operation(
                    "succeeded",
                    verification="unverified",
                    warnings=[{"reason": "SLOW_RANK", "message": "rank 1 lags"}],
                ),
            )
        )
        ran = at(*DRAIN)
        assert "unverified" in ran.out
        assert "warning SLOW_RANK" in ran.out


class TestStream:
    def test_it_goes_on_where_it_broke_and_repeats_nothing(self, at: Run, gateway: Gateway) -> None:
        running = Answer(200, operation("running"))
        gateway.then(accepted)
        gateway.then(stream(event(7, "dispatched", 1, {}))).then(running)
        gateway.then(Answer(drop=True))
        gateway.then(stream(SUCCEEDED)).then(Answer(200, operation("succeeded")))
        ran = at(*DRAIN, "--wait")
        assert ran.code == 0
        assert (ran.err.count("dispatched"), ran.err.count("completed")) == (1, 1)
        streams = [seen for seen in gateway.seen if seen.path.endswith("/events")]
        places = [seen.headers.get("last-event-id") for seen in streams]
        assert places == [None, "1a2b3c4d-7", "1a2b3c4d-7"]

    def test_a_gateway_that_restarts_is_waited_for(self, at: Run, gateway: Gateway) -> None:
        goodbye = 'event: goodbye\ndata: {"reason": "shutting_down"}\n\n'
        gateway.then(accepted).then(stream(goodbye))
        for _ in range(5):  # more than one call tries by itself
            gateway.then(Answer(drop=True))
        gateway.then(problem(503, title="Closing")).then(problem(429, title="Too many streams"))
        gateway.then(stream(SUCCEEDED)).then(Answer(200, operation("succeeded")))
        assert at(*DRAIN, "--wait").code == 0

    @pytest.mark.parametrize("status", [401, 403, 404])
    def test_a_wait_that_is_cut_short_is_no_refusal_of_the_order(
        self, at: Run, gateway: Gateway, status: int
    ) -> None:
        gateway.then(accepted).then(problem(status, title="Token expired"))
        ran = at(*DRAIN, "--wait")
        assert ran.code == 5
        assert "Token expired; the operation goes on" in ran.err

    def test_ctrl_c_leaves_the_operation_to_itself(
        self, at: Run, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(_seen: Seen) -> Answer:
            os.kill(os.getpid(), signal.SIGINT)
            return stream()

        gateway.then(accepted).then(interrupt)
        ran = at(*DRAIN, "--wait")
        assert ran.code == 130
        assert ran.err == "chadburn: the operation goes on: chadburn ops watch op-1\n"

    def test_no_content_means_that_it_has_ended(self, at: Run, gateway: Gateway) -> None:
        gateway.then(accepted).then(Answer(204)).then(Answer(200, operation("succeeded")))
        assert at(*DRAIN, "--wait").code == 0

    def test_control_events_are_not_told(self, at: Run, gateway: Gateway) -> None:
        goodbye = 'event: goodbye\ndata: {"why": "shutdown"}\n\n'
        gateway.then(accepted).then(stream(goodbye)).then(Answer(200, operation("succeeded")))
        ran = at(*DRAIN, "--wait")
        assert (ran.code, ran.err) == (0, "")


class TestRefusal:
    def test_one_line_says_all_there_is_to_know(self, at: Run, gateway: Gateway) -> None:
        gateway.then(
            problem(
                409,
                title="Engine busy",
                detail="another operation is running on this engine",
                reason="ENGINE_BUSY",
                operation="op-7",
                request_id="req-1",
                errors=[],
            )
        )
        ran = at(*DRAIN)
        assert (ran.code, ran.out) == (6, "")
        assert ran.err == (
            "chadburn: Engine busy: another operation is running on this engine"
            " (ENGINE_BUSY, operation op-7, request req-1)\n"
        )

    def test_bad_fields_are_named(self, at: Run, gateway: Gateway) -> None:
        faults = [{"pointer": "/mode", "detail": "unknown"}, {"parameter": "x", "detail": "odd"}]
        gateway.then(problem(422, title="Bad request", reason="INVALID_ARGUMENT", errors=faults))
        assert "; /mode: unknown; x: odd (" in at(*DRAIN).err

    @pytest.mark.parametrize(
        ("status", "code"), [(400, 6), (401, 6), (403, 6), (404, 6), (412, 6), (501, 6), (429, 7)]
    )
    def test_the_status_decides_the_code(
        self, at: Run, gateway: Gateway, status: int, code: int
    ) -> None:
        gateway.then(problem(status, title="No", detail="not so"))
        ran = at(*DRAIN, "--key", "k")
        assert ran.code == code
        assert "--key" not in ran.err

    def test_something_that_is_no_gateway(self, at: Run, gateway: Gateway) -> None:
        gateway.then(Answer(404, text="<html>", kind="text/html"))
        ran = at(*DRAIN)
        assert (ran.code, ran.err.count("\n")) == (6, 1)
        gateway.then(Answer(200, text="<html>", kind="text/html"))
        gateway.answers.pop(0)
        assert at(*DRAIN).code == 7


class TestLostAnswer:
    def test_the_same_key_is_sent_again(self, at: Run, gateway: Gateway) -> None:
        gateway.then(Answer(drop=True)).then(Answer(drop=True)).then(accepted)
        assert at(*DRAIN).code == 0
        keys = {seen.headers["idempotency-key"] for seen in gateway.seen}
        assert (len(gateway.seen), len(keys)) == (3, 1)

    def test_nobody_learns_whether_it_was_taken(self, at: Run, gateway: Gateway) -> None:
        gateway.then(Answer(drop=True))
        ran = at(*DRAIN, "--key", "k-9")
        assert ran.code == 7
        assert "repeat it with --key k-9" in ran.err

    def test_nor_after_an_answer_that_leaves_it_open(self, at: Run, gateway: Gateway) -> None:
        gateway.then(problem(503, title="Unavailable", reason="LEDGER_UNAVAILABLE"))
        assert "repeat it with --key k-9" in at(*DRAIN, "--key", "k-9").err

    def test_nothing_was_sent_where_nobody_listens(self, run: Run) -> None:
        ran = run(*DRAIN, "--url", "http://127.0.0.1:1", "--token", "t")
        assert ran.code == 7
        assert "--key" not in ran.err

    def test_cancelling_is_not_sent_twice(self, at: Run, gateway: Gateway) -> None:
        gateway.then(Answer(drop=True))
        assert at("ops", "cancel", "op-1").code == 7
        assert len(gateway.seen) == 1
