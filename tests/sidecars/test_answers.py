"""What answers mean, what may be sent, and what files hold: no server, no clock."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.conformance.tensors import (
    Tensor,
    misnamed,
    misshapen,
    mistyped,
    not_finite,
    written,
)
from app.domain.kinds import ContentPolicy, PauseMode, WeightsState
from app.domain.weight_sources import DiskWeights
from app.enginekit.runtime import RuntimeFault
from app.sidecars.allowed import Allowed, all_below
from app.sidecars.answers import Answer, Unreadable, field_of
from app.sidecars.checkpoints import digest_of, looked_at
from app.sidecars.safetensors import INDEX, BadWeights, files_at, fits
from app.sidecars.vllm.aborting import ids_for
from app.sidecars.vllm.answers import Sleeping, flushed, metrics_of, vllm_text
from app.sidecars.vllm.belief import (
    BOTH,
    KV,
    WEIGHTS,
    Belief,
    ReleaseKv,
    Sleep,
    Wake,
    first_belief,
)
from app.sidecars.vllm.cache_sources import sources_of
from app.sidecars.vllm.discovery import Identity
from app.sidecars.vllm.weight_orders import by_rank
from tests.sidecars.checkpoints import checkpoint, weights

KEEP, DISCARD, PRESERVE = PauseMode.KEEP, ContentPolicy.DISCARD, ContentPolicy.PRESERVE


def answer(body: Any, status: int = 200) -> Answer:
    return Answer(status, body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "no", "code": 400}}, "no"),
        ({"error": "Failed to pause generation: gone"}, "Failed to pause generation: gone"),
        ({"detail": "Not Found"}, "Not Found"),
        (b"", "the engine answered with status 503"),
        (b"<html>", "the engine answered with status 503"),
        ([], "the engine answered with status 503"),
        ({"error": {"message": "a\nb" * 500}}, ("a b" * 100)),
        (
            {
                "error": {
                    "message": "Call to collective_rpc method failed: Worker failed with error"
                    " 'no such file', please check the stack trace above for the root cause"
                }
            },
            "no such file",
        ),
    ],
)
def test_the_words_of_an_error(body: Any, text: str) -> None:
    assert vllm_text(answer(body, 503)) == text


def test_fields_have_to_be_what_they_are_called() -> None:
    assert field_of(answer({"aborted": 3}), "aborted", int) == 3
    wrong: tuple[Any, ...] = ({"aborted": True}, {"aborted": "3"}, {}, [], b"", None)
    for body in wrong:
        with pytest.raises(Unreadable):
            field_of(answer(body), "aborted", int)
    assert flushed(answer({"success": True}))
    assert not flushed(answer({"success": False}))
    assert flushed(Answer(200, b""))  # as the other caches answer
    deep = b"[" * 100_000
    with pytest.raises(Unreadable):
        answer(deep).json()
    half = b'{"weight_version": "\\uD83D"}'
    with pytest.raises(Unreadable):
        field_of(answer(half), "weight_version", str)
    whole = b'{"weight_version": "\\uD83D\\uDE00"}'
    assert field_of(answer(whole), "weight_version", str) == "\N{GRINNING FACE}"
    assert vllm_text(answer(deep, 500)) == "the engine answered with status 500"


def test_metrics() -> None:
    text = """# HELP x y
process_start_time_seconds 1.79605538726e+09
vllm:num_requests_running{engine="0",model_name="a"} 2.0
vllm:num_requests_running{engine="1",model_name="a"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a"} 4.0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 1.0
vllm:lora_requests_info{running_lora_adapters="old",waiting_lora_adapters=""} 5.0
vllm:lora_requests_info{running_lora_adapters="a,b",waiting_lora_adapters="c"} 6.0
not a sample
vllm:broken{engine="0"} x
vllm:num_requests_running{engine="2"} NaN
vllm:num_requests_waiting{engine="2"} +Inf
"""
    metrics = metrics_of(answer(text.encode()))
    assert metrics.started_at == 1796055387.26
    assert metrics.in_flight == 7
    assert metrics.by_engine("vllm:num_requests_running") == {0: 2.0, 1: 1.0}
    assert metrics.sleep is Sleeping.DISCARDED
    assert metrics.adapters_in_use() == {"a", "b", "c"}
    nothing = metrics_of(answer(b""))
    assert nothing.in_flight is None
    assert nothing.sleep is None
    assert not nothing.adapters_in_use()
    kv = b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'
    assert metrics_of(answer(kv)).sleep is Sleeping.KV_ALONE


def test_ids_that_the_engine_may_know_a_request_by() -> None:
    assert ids_for("cmpl-a") == ("cmpl-a", "cmpl-a-0")
    assert ids_for("cmpl-a-0") == ("cmpl-a-0",)
    assert ids_for("chatcmpl-a") == ("chatcmpl-a",)


def test_event_sources() -> None:
    config = {"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv", "hwm": 9}
    body = {"0": config, "1": {"publisher": "null"}, "2": {**config, "endpoint": "tcp://h:5559"}}
    found = sources_of(answer(body), "http://engine:8000", frozenset())
    assert [(s.data_parallel_rank, s.endpoint_addr.host, s.endpoint_addr.port) for s in found] == [
        (0, "engine", 5557),
        (2, "h", 5559),
    ]
    assert (found[0].topic, found[0].hwm, found[0].encoding) == ("kv", 9, "msgpack")
    assert len(sources_of(answer(body), "http://engine", frozenset({2}))) == 1
    with pytest.raises(Unreadable):
        sources_of(answer([]), "http://engine", frozenset())


# ---- what may be sent ----


def test_what_an_engine_must_not_be_sent() -> None:
    asleep = Belief(paused=KEEP, released=BOTH, asleep=BOTH)
    broken = Belief(paused=KEEP, weights=WeightsState.INCONSISTENT)
    for refusing in (
        asleep.may_resume,
        broken.may_resume,
        asleep.may_start_update,
        Belief().may_start_update,
        lambda: Belief(paused=KEEP).may_drain(1),
        lambda: Belief(paused=KEEP).may_drain(None),
    ):
        with pytest.raises(RuntimeFault) as refused:
            refusing()
        assert refused.value.code == "FAILED_PRECONDITION"
    Belief(paused=KEEP).may_drain(0)
    Belief(paused=KEEP).may_resume()
    broken.may_start_update()
    replace(asleep, asleep=frozenset({KV})).may_start_update()


def test_how_memory_is_released_and_restored() -> None:
    paused = Belief(paused=KEEP)
    assert paused.release(BOTH, PRESERVE, selective=True) == (Sleep(1),)
    assert paused.release(frozenset({WEIGHTS}), DISCARD, selective=True) == (Sleep(2),)
    assert paused.release(frozenset({KV}), DISCARD, selective=True) == (ReleaseKv(),)
    alone = paused.release(frozenset({KV}), DISCARD, selective=False)
    assert alone == (Sleep(1), Wake(frozenset({WEIGHTS})))
    kv = replace(paused, released=frozenset({KV}), asleep=frozenset({KV}))
    assert kv.release(frozenset({WEIGHTS}), PRESERVE, selective=True) == (
        Wake(frozenset({KV})),
        Sleep(1),
    )
    weights_away = replace(paused, released=frozenset({WEIGHTS}), asleep=BOTH)
    assert weights_away.release(frozenset({KV}), DISCARD, selective=True) == ()
    assert weights_away.restore(frozenset({WEIGHTS})) == (Wake(BOTH),)
    missing = replace(weights_away, weights=WeightsState.MISSING)
    (step,) = missing.restore(frozenset({WEIGHTS}))
    assert step == Wake(frozenset({WEIGHTS}))
    assert not missing.opens(step)
    valid = replace(missing.after(step), released=frozenset(), weights=WeightsState.VALID)
    (last,) = valid.catch_up()
    assert last == Wake(frozenset({KV}))
    assert valid.opens(last)
    assert paused.after(Sleep(2)).weights is WeightsState.MISSING
    assert paused.after(ReleaseKv()).asleep == {KV}


def test_beliefs_are_of_one_life_of_an_engine() -> None:
    identity = Identity(1.0, "a")
    belief = Belief(
        paused=PauseMode.ABORT, released=BOTH, asleep=BOTH, weights=WeightsState.MISSING
    )
    document = json.loads(json.dumps(belief.document(identity)))
    assert Belief.of(document, identity) == belief
    assert Belief.of(document, Identity(2.0, "a")) is None
    wrong: tuple[Any, ...] = ({}, [], {**document, "paused": "?"}, {**document, "asleep": 5})
    for damaged in wrong:
        with pytest.raises(ValueError):  # noqa: PT011
            Belief.of(damaged, identity)
    assert first_belief(paused=True, sleep=Sleeping.AWAKE) == Belief(paused=KEEP)
    assert first_belief(paused=True, sleep=Sleeping.KV_ALONE).asleep == {KV}
    assert first_belief(paused=True, sleep=Sleeping.DISCARDED).weights is WeightsState.MISSING
    assert first_belief(paused=False, sleep=None) == Belief()


# ---- weights ----


def test_checksums_by_rank() -> None:
    sums = {
        "dp0:pp0:pcp0:tp0:a": "1",
        "dp0:pp0:pcp0:tp1:a": "2",
        "dp1:pp1:pcp0:tp1:a:b": "3",
        "other": "4",
    }
    found = by_rank(sums, 2, 2)
    assert found == {0: {"a": "1"}, 1: {"a": "2"}, 7: {"a:b": "3"}}
    assert digest_of({"a": "1", "b": "2"}) == digest_of({"b": "2", "a": "1"})
    assert digest_of({"a": "1"}) != digest_of({"a": "2"})


def _file(folder: Path, tensors: tuple[Tensor, ...], name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(written(tensors))
    return folder


def test_weights_that_fit_and_that_do_not(tmp_path: Path) -> None:
    model = files_at(checkpoint(tmp_path / "model", 1))
    fits(files_at(_file(tmp_path / "good", weights(2))), model)
    changed = (misnamed(weights(2)), misshapen(weights(2)), mistyped(weights(2)), weights(2)[1:])
    for number, bad in enumerate(changed):
        with pytest.raises(BadWeights):
            fits(files_at(_file(tmp_path / f"bad{number}", bad)), model)


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", 1)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for content in (b"", whole[:4], whole[:-1], whole + b"x", whole[: 8 + length - 3], b"x" * 64):
        file.write_bytes(content)
        with pytest.raises(BadWeights):
            files_at(folder)
    file.unlink()
    with pytest.raises(BadWeights):
        files_at(folder)
    with pytest.raises(BadWeights):
        files_at(tmp_path / "nowhere")
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(BadWeights, match="regular"):
        files_at(folder)
    (folder / "model.safetensors").unlink()
    _file(folder, weights(1), "a.safetensors")
    _file(folder, weights(1), "b.safetensors")
    with pytest.raises(BadWeights, match="no index"):
        files_at(folder)
    for index in ("{", "[]", '{"weight_map": {"a": "../x"}}', '{"weight_map": {}}'):
        (folder / INDEX).write_text(index)
        with pytest.raises(BadWeights):
            files_at(folder)
    (folder / INDEX).write_text('{"weight_map": {"x": "a.safetensors"}}')
    assert [one.path.name for one in files_at(folder)] == ["a.safetensors"]


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_numbers_that_are_none(tmp_path: Path, dtype: str) -> None:
    size = {"F64": 8, "F32": 4}.get(dtype, 2)
    fine = Tensor("a", dtype, (2, 2), bytes(range(1, 1 + 4 * size)))
    assert files_at(_file(tmp_path / "fine", (fine,)))[0].finite() is None
    bad = not_finite((Tensor("b", dtype, (2, 2), bytes(4 * size)),))
    assert files_at(_file(tmp_path / "bad", (fine, *bad)))[0].finite() == "b"
    whole = Tensor("c", "I32", (1,), b"\xff\xff\xff\xff")
    assert files_at(_file(tmp_path / "whole", (whole,)))[0].finite() is None


_ONE = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'


@pytest.mark.parametrize(
    "header",
    [
        b"\xef\xbb\xbf" + f'{{"a": {_ONE}}}'.encode(),
        f'{{"a": {_ONE}}}'.encode("utf-16"),
        f'{{"a": {_ONE[:-1]}, "dtype": "F32"}}}}',
        f'{{"a": {_ONE}, "a": {_ONE}}}',
        f'{{"a": {_ONE[:-1]}, "more": 1}}}}',
        f'{{"a": {_ONE.replace(chr(34) + "F32" + chr(34), "[]")}}}',
        f'{{"\\ud800": {_ONE}}}',
        *(
            f'{{"a": {_ONE}, "__metadata__": {metadata}}}'
            for metadata in ("5", "[]", '{"b": 1}', '{"b": {}}', '{"b": NaN}', '{"b": "\\ud800"}')
        ),
        f'{{"a": {_ONE}, "__metadata__": {{}}, "__metadata__": {{}}}}',
        f'{{"a": {_ONE}, "__metadata__": {"[" * 100_000}{"]" * 100_000}}}',
    ],
)
def test_headers_that_engines_cannot_read(tmp_path: Path, header: str | bytes) -> None:
    """Other readers of JSON take them; the one in the engines does not, and some end over it."""
    raw = header if isinstance(header, bytes) else header.encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4))
    with pytest.raises(BadWeights):
        files_at(tmp_path)


def test_headers_as_others_write_them(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for header in (f' {{"a": {_ONE}}}  ', f'{{"__metadata__": {{"format": "pt"}}, "a": {_ONE}}}'):
        file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
        assert list(files_at(tmp_path)[0].tensors) == ["a"]


def test_a_folder_whose_name_is_a_pattern(tmp_path: Path) -> None:
    """An engine would read `v1`, where `v[12]` was looked at."""
    allowed = Allowed(weights_roots=(tmp_path,), lora_roots=(tmp_path,))
    for name in ("v[12]", "*", "v?"):
        folder = checkpoint(tmp_path / name, 1)
        link = tmp_path / "link"
        link.symlink_to(folder)
        for path in (folder, link):
            with pytest.raises(RuntimeFault, match="pattern"):
                looked_at(DiskWeights(str(path)), allowed, model=None, check_finite=False)
            with pytest.raises(RuntimeFault, match="pattern"):
                all_below(allowed.lora_roots, str(path))
        link.unlink()


def test_what_is_not_allowed_is_told_like_what_is_not_there(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "circle").symlink_to("circle")
    (root / "away").symlink_to(checkpoint(tmp_path / "outside", 1))
    told = set()
    for path in (root / "circle", root / "away", root / "nothing", tmp_path / "outside"):
        with pytest.raises(RuntimeFault) as refused:
            all_below((root,), str(path))
        told.add((refused.value.reason, refused.value.message))
    assert len(told) == 1
