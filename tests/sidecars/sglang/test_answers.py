"""What answers mean, what may be sent, and how requests are worded: no server, no clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from app.domain.kinds import PauseMode, ResourceKind, TensorDtype, WeightsState
from app.domain.tensors import TensorSpec
from app.enginekit.runtime import RuntimeFault
from app.rpc.openengine.v1 import generation_pb2 as gen
from app.sidecars.answers import Answer, Unreadable
from app.sidecars.sglang.answers import (
    acknowledged,
    adapters_after,
    checksums,
    loads,
    nothing,
    sglang_text,
    succeeded,
)
from app.sidecars.sglang.belief import Belief, Hold
from app.sidecars.sglang.discovery import Identity, identity_of
from app.sidecars.sglang.generating import Generation, body_of
from app.sidecars.sglang.payloads import batches, payload_of
from tests.doubles.sglang_model import tensors_in

KV, WEIGHTS = ResourceKind.KV_CACHE, ResourceKind.WEIGHTS


def answer(body: Any, status: int = 200) -> Answer:
    return Answer(status, body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "no"}}, "no"),
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"success": False, "message": "bad /srv/models/x: no file"}, "bad (path): no file"),
        ({"success": False, "error_message": "in /a/b.json"}, "in (path)"),
        ({"message": "2 validation errors:\n File \"/srv/x.py\", line 1", "code": 400},
         "the engine does not take this body"),
        (b"Flush cache failed.\n", "Flush cache failed."),
        (b"Internal Server Error", "Internal Server Error"),
        (b"", "the engine answered with status 503"),
        ([], "the engine answered with status 503"),
    ],
)  # fmt: skip
def test_the_words_of_a_refusal(body: Any, text: str) -> None:
    assert sglang_text(answer(body, 503)) == text


def test_yes_has_its_shape() -> None:
    assert succeeded(answer({"success": True, "message": "Success | Success"})) == (
        "Success | Success"
    )
    nothing(answer(None))
    acknowledged(answer({"message": "m", "status": "ok"}))
    assert adapters_after(answer({"success": True, "loaded_adapters": {"a": "/x"}})) == {"a": "/x"}
    wrong: tuple[tuple[Callable[[Answer], Any], tuple[Any, ...]], ...] = (
        (succeeded, ({"success": False, "message": "no"}, {"success": True}, None, [], b"x")),
        (nothing, ({}, [], True, b"")),
        (acknowledged, ({"status": "no"}, {}, None)),
        (adapters_after, ({"success": False, "error_message": "no"}, {"success": True}, None)),
        (loads, ({"timestamp": "2026-01-01T00:00:00+00:00", "loads": []}, {"loads": [{}]}, None)),
        (checksums, ({"success": True, "message": "", "ranks": [{}]}, {"success": False})),
    )
    for check, bodies in wrong:
        for body in bodies:
            with pytest.raises(Unreadable):
                check(answer(body))


def test_loads_and_how_old_they_are() -> None:
    row = {
        "timestamp": 1_767_225_600.0, "dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1,
        "num_used_tokens": 5, "max_total_num_tokens": 100,
    }  # fmt: skip
    body = {
        "timestamp": "2026-01-01T00:00:40+00:00",
        "loads": [row, {**row, "dp_rank": 1, "timestamp": 1_767_225_610.0}],
    }
    found = loads(answer(body))
    assert found.in_flight == 6
    assert found.age_s == 40.0
    for name, wrong in (("num_running_reqs", True), ("timestamp", "x"), ("dp_rank", None)):
        with pytest.raises(Unreadable):
            loads(answer({**body, "loads": [{**row, name: wrong}]}))
    with pytest.raises(Unreadable):
        loads(answer({**body, "timestamp": "yesterday"}))


def test_checksums_need_a_place() -> None:
    place = {"role": "target", "tp_rank": 1, "dp_rank": 0, "pp_rank": 2}
    body = {"success": True, "message": "", "ranks": [
        {"checksums": {"w": "00"}, "parallelism_info": [place]},
    ]}  # fmt: skip
    (one,) = checksums(answer(body))
    assert (one.dp_rank, one.pp_rank, one.tp_rank, dict(one.sums)) == (0, 2, 1, {"w": "00"})
    assert checksums(answer({**body, "ranks": []})) == ()


def test_what_must_not_be_sent() -> None:
    paused = Belief(paused=PauseMode.KEEP, hold=Hold.IN_PLACE)
    away = replace(paused, released=frozenset({KV}))
    unknown = replace(away, doubtful=True)
    for refusing in (
        away.may_resume,
        replace(paused, weights=WeightsState.INCONSISTENT).may_resume,
        lambda: Belief().may_release(frozenset({KV})),
        lambda: away.may_release(frozenset({KV})),
        lambda: away.may_restore(frozenset({WEIGHTS})),
        lambda: away.may_restore(frozenset({KV, WEIGHTS})),
        Belief().may_update,
        replace(paused, released=frozenset({WEIGHTS})).may_update,
        unknown.may_resume,
        unknown.may_update,
        lambda: unknown.may_release(frozenset({WEIGHTS})),
        lambda: unknown.may_restore(frozenset({KV})),
    ):
        with pytest.raises(RuntimeFault) as refused:
            refusing()
        assert refused.value.code == "FAILED_PRECONDITION"
    away.may_release(frozenset({WEIGHTS}))
    away.may_restore(frozenset({KV}))
    away.may_update()
    paused.may_resume()


def test_beliefs_are_of_one_life() -> None:
    belief = Belief(
        paused=PauseMode.DRAIN, hold=Hold.RETRACT, released=frozenset({KV}), doubtful=True,
        weights=WeightsState.INCONSISTENT, session=True, models=("tiny",), root="/m",
    )  # fmt: skip
    document = json.loads(json.dumps(belief.document(Identity("a"))))
    assert Belief.of(document, Identity("a")) == belief
    assert Belief.of(document, Identity("b")) is None
    wrong: tuple[Any, ...] = ({}, [], {**document, "hold": "?"}, {**document, "released": 5})
    for damaged in wrong:
        with pytest.raises(ValueError):  # noqa: PT011
            Belief.of(damaged, Identity("a"))
    info = {"startup_time": {"load_weight": 1.25}, "random_seed": 7, "port": 30000}
    assert identity_of(info) == identity_of({**info, "api_key": "x"})
    assert identity_of(info) != identity_of({**info, "startup_time": {"load_weight": 1.26}})
    nothing_told: tuple[dict[str, Any], ...] = ({}, {"startup_time": 5}, {"startup_time": {}})
    for nameless in nothing_told:
        with pytest.raises(Unreadable):
            identity_of(nameless)


# ---- requests ----


def event(ids: list[int], text: str, total: int, reason: Any = None) -> dict[str, Any]:
    meta = {"completion_tokens": total, "prompt_tokens": 2, "finish_reason": reason}
    return {"text": text, "output_ids": ids, "meta_info": meta}


def test_events_that_tell_all_and_events_that_tell_what_is_new() -> None:
    for events in (
        [event([1], "a", 1), event([1, 2], "a\N{REPLACEMENT CHARACTER}", 2),
         event([1, 2, 3], "a\N{SNOWMAN}", 3, {"type": "stop", "matched": 3})],
        [event([1], "a", 1), event([2], "", 2),
         event([3], "\N{SNOWMAN}", 3, {"type": "stop", "matched": 3})],
    ):  # fmt: skip
        reading = Generation(gen.GenerateRequest(prompt="x"), "id")
        told = [reading.tokens(one) for one in events]
        assert [one.token_id for output in told if output for one in output.tokens] == [1, 2, 3]
        assert "".join(output.text for output in told if output) == "a\N{SNOWMAN}"
        end = reading.finished(events[-1])
        assert end is not None
        assert (end.reason, end.stop_match.stop_token_id) == (gen.FINISH_REASON_STOP, 3)
        usage = reading.usage(events[-1])
        assert usage is not None
        assert usage.total_tokens == 5
    assert Generation(gen.GenerateRequest(prompt="x"), "i").tokens({"text": 1}) is None


def test_how_a_request_is_worded() -> None:
    request = gen.GenerateRequest(lora_name="a")
    request.token_ids.ids.extend([1, 2])
    request.sampling.temperature = 0.5
    request.sampling.top_k = 0
    request.sampling.seed = 9
    request.stopping.max_tokens = 5
    request.stopping.conditions.add().stop_text = "end"
    assert body_of(request, "id") == {
        "rid": "id",
        "stream": True,
        "input_ids": [1, 2],
        "lora_path": "a",
        "sampling_params": {
            "temperature": 0.5,
            "top_k": -1,
            "sampling_seed": 9,
            "max_new_tokens": 5,
            "stop": ["end"],
        },
    }


def test_payloads() -> None:
    one = (TensorSpec("a", TensorDtype.BFLOAT16, (2, 3)), bytes(range(12)))
    scalar = (TensorSpec("b", TensorDtype.FLOAT32, ()), bytes(4))
    found = tensors_in(payload_of([one, scalar]))
    assert {name: form for name, (form, _) in found.items()} == {
        "a": ("BFloat16Storage", (2, 3)),
        "b": ("FloatStorage", ()),
    }
    assert payload_of([one]) == payload_of([one])
    assert [len(part) for part in batches([one, scalar, one], 16)] == [2, 1]
    assert [len(part) for part in batches([one, one], 4)] == [1, 1]
