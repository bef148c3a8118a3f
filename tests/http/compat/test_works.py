"""Caches, requests, adapters, profiles and shape by the endpoints; and how refusals look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.domain.kinds import PauseMode
from app.http.compat.asked import Asked, field
from app.http.compat.refusals import BadBody, Invalid
from app.http.compat.transfers import piece_of, transfer_of
from app.http.compat.vllm.pauses import pause_asked, sleep_asked, tags_asked
from app.http.compat.vllm.readings import abort_asked, reset_asked
from app.http.compat.vllm.table import VLLM
from tests.enginekit.client import client_of
from tests.enginekit.client import until as settled
from tests.http.compat.layered import Layered, layered
from tests.http.gateway import EVERYTHING

pytestmark = pytest.mark.anyio


async def test_abort_all_counts_what_has_ended(vllm: Layered) -> None:
    vllm.engine.stall()
    async with client_of(vllm.full.double) as direct:
        streams = [direct.generate() for _ in range(3)]
        await settled(lambda: vllm.engine.running == 3)
        named = {"request_ids": [streams[0].request_id, "nobody"]}
        assert await vllm.does("/abort_requests", named) == {"status": "aborted", "aborted": 1}
        await settled(lambda: vllm.engine.running == 2)
        assert await vllm.does("/abort_requests", {}) == {"status": "aborted", "aborted": 2}
        for stream in streams:
            assert await stream.finish_reason() == "CANCELLED"
    assert await vllm.does("/abort_requests", {"request_ids": []}) == {
        "status": "aborted",
        "aborted": 0,
    }
    misspelt = await vllm.post("/abort_requests", {"ids": ["a"]})
    assert misspelt.status_code == 400  # and does not end all
    assert await vllm.kinds() == ["abort_requests"] * 3  # each one is another


@pytest.mark.long
async def test_caches(vllm: Layered) -> None:
    told = await vllm.does("/reset_prefix_cache", {"reset_running_requests": False})
    assert told == {"success": True}
    assert (await vllm.post("/reset_mm_cache")).content == b""
    assert (await vllm.post("/reset_encoder_cache")).status_code == 200
    caches = [one["request"]["caches"] for one in await vllm.operations()]
    assert caches == [["prefix"], ["multimodal"], ["encoder"]]


@pytest.mark.long
async def test_adapters(vllm: Layered) -> None:
    load = {"lora_name": "a", "lora_path": "/adapters/a", "base_model_name": "tiny"}
    for _ in range(2):
        loaded = await vllm.post("/v1/load_lora_adapter", load)
        assert loaded.text == "Success: LoRA adapter 'a' added successfully."
        assert "content-type" not in loaded.headers
    await vllm.does("/pause?mode=keep")  # so that it is no repetition any more
    for body, words in (
        ({**load, "lora_path": "/adapters/b"}, "already been loaded"),
        ({**load}, "already been loaded"),
        ({**load, "lora_name": "tiny"}, "base model"),
        ({**load, "load_inplace": True}, "load_inplace"),
        ({**load, "lora_name": ""}, "must be provided"),
    ):
        refused = await vllm.post("/v1/load_lora_adapter", body)
        error = refused.json()["error"]
        assert (refused.status_code, error["type"]) == (400, "InvalidUserInput")
        assert words in error["message"]
    wrong = await vllm.post("/v1/unload_lora_adapter", {"lora_name": "a", "lora_int_id": 7})
    assert wrong.status_code == 404
    gone = await vllm.post("/v1/unload_lora_adapter", {"lora_name": "a", "lora_int_id": 1})
    assert gone.text == "Success: LoRA adapter 'a' removed successfully."
    assert (await vllm.post("/v1/unload_lora_adapter", {"lora_name": "b"})).status_code == 404


@pytest.mark.long
async def test_a_profile(vllm: Layered) -> None:
    assert (await vllm.post("/stop_profile")).status_code == 200  # there is none
    assert (await vllm.post("/start_profile", {"max_iterations": 0})).content == b""
    theirs = await vllm.post("/start_profile", subject="bob")
    assert (theirs.status_code, theirs.json()) == (
        409,
        {
            "detail": "A profiling session is already active. Call /stop_profile before starting "
            "another session."
        },
    )
    assert (await vllm.post("/stop_profile")).content == b""
    (profile,) = await vllm.operations()
    assert (profile["state"], len(profile["result"]["artifacts"])) == ("succeeded", 2)
    for body in ({"delay_iterations": 3}, {"profile_prefix": "x"}, {"max_iterations": -1}):
        assert (await vllm.post("/start_profile", body)).status_code == 400


@pytest.mark.long
async def test_the_shape(vllm: Layered) -> None:
    assert await vllm.does("/is_scaling_elastic_ep") == {"is_scaling_elastic_ep": False}
    scaled = await vllm.does("/scale_elastic_ep", {"new_data_parallel_size": 1})
    assert scaled == {"message": "Scaled to 1 data parallel engines"}
    assert await vllm.kinds() == ["reconfigure_serving"]
    assert await vllm.reads("/get_world_size") == {"world_size": 2}
    assert set(await vllm.reads("/server_info")) == {"vllm_config", "vllm_env", "system_env"}
    config = (await vllm.reads("/server_info?config_format=json"))["vllm_config"]
    assert config["engine_name"] == "minimal"
    assert await vllm.reads("/version") == {"version": "1"}
    assert await vllm.reads("/health") is None


@pytest.mark.long
async def test_an_engine_that_is_gone(vllm: Layered) -> None:
    await vllm.full.double.kill()
    health = await vllm.call("GET", "/health")
    assert (health.status_code, health.content) == (503, b"")
    paused = await vllm.call("GET", "/is_paused")
    assert paused.status_code == 503
    assert paused.json()["error"].startswith("Failed to fetch pause status: ")


@pytest.mark.parametrize("flavour", ["0.26", pytest.param("0.32", marks=pytest.mark.long)])
async def test_refusals_have_the_shapes_of_the_release(tmp_path: Path, flavour: str) -> None:
    async with layered(tmp_path, flavour=flavour) as vllm:

        def shaped(message: str, kind: str, code: int) -> dict[str, Any]:
            full = {"message": message, "type": kind, "param": None, "code": code}
            return {"detail": message} if flavour == "0.26" else {"error": full}

        malformed = await vllm.call("POST", "/abort_requests", content=b"{")
        assert malformed.status_code == 400
        assert malformed.json() == shaped("Invalid JSON format", "Bad Request", 400)
        stranger = await vllm.gate.http.post(f"{vllm.url}/pause")
        assert (stranger.status_code, set(stranger.json())) == (401, {"error"})
        assert stranger.headers["www-authenticate"].startswith("Bearer ")
        reader = vllm.gate.auth("admin:read")
        denied = await vllm.gate.http.post(f"{vllm.url}/pause", headers=reader)
        assert denied.status_code == 403
        assert denied.json()["error"]["type"] == "PermissionDeniedError"
        enum = await vllm.post("/pause?mode=stop")
        assert enum.json()["error"] == {
            "message": "1 validation error:\n  {'type': 'enum', 'loc': 'query.mode', 'msg': "
            "\"Input should be 'abort', 'wait' or 'keep'\"}",
            "type": "Bad Request",
            "param": "query.mode",
            "code": 400,
        }
        never = await vllm.post("/collective_rpc", {"method": "check_health"})
        assert never.status_code == 403
        assert "no method of a caller's choice" in never.text
        assert never.headers["content-type"] == "application/json"
        assert await vllm.operations() == []


async def test_every_endpoint_takes_the_scopes_that_it_names(vllm: Layered) -> None:
    for row in VLLM.rows:
        if not row.backed(vllm.engine.offered):
            continue
        path = row.path.replace("{name:path}", "x")
        held = {scope for scope in EVERYTHING if scope not in row.scopes}
        url = f"{vllm.url}{path}"
        stranger = await vllm.gate.http.request(row.methods[0], url)
        assert stranger.status_code == 401, row
        if row.scopes:
            auth = vllm.gate.auth(*held)
            lacking = await vllm.gate.http.request(row.methods[0], url, headers=auth)
            assert lacking.status_code == 403, row
    assert await vllm.operations() == []


@pytest.mark.parametrize(
    ("asked", "read"),
    [
        (Asked(query=(("n", "x"),)), lambda a: a.number("n", default=1, least=0, most=2)),
        (Asked(query=(("n", "3"),)), lambda a: a.number("n", default=1, least=0, most=2)),
        (Asked(query=(("n", "-1"),)), lambda a: a.number("n", default=1, least=0, most=2)),
        (Asked(query=(("n", "maybe"),)), lambda a: a.flag("n", default=True)),
        (Asked(), lambda a: a.model()),
        (Asked(body=b"[]"), lambda a: a.model()),
        (Asked(body=b"{", content_type="application/json"), lambda a: a.model()),
        (Asked(body=b"{}", content_type="text/plain"), lambda a: a.model()),
        (Asked(body=b"{}", content_type="text/plain"), lambda a: a.json_only()),
        (Asked(), lambda _: field({"n": True}, "n", int)),
        (Asked(), lambda _: field({"n": None}, "n", int)),
        (Asked(body=b"[1]"), lambda a: a.raw_object()),
        (Asked(body=b'{"a": NaN}'), lambda a: a.raw_object()),
    ],
)
def test_what_can_not_be_read(asked: Asked, read: Any) -> None:
    with pytest.raises((Invalid, BadBody)):
        read(asked)


FORM = "application/x-www-form-urlencoded"
TWICE = b'{"request_ids": ["a"], "request_ids": []}'


@pytest.mark.parametrize(
    ("asked", "read"),
    [
        (Asked(body=b"mode=keep", content_type=FORM), pause_asked),
        (Asked(body=b'{"mode": "keep"}', content_type=FORM), pause_asked),
        (Asked(query=(("level", "1"),), body=b"level=2", content_type=FORM), sleep_asked),
        (Asked(body=b"tags=weights", content_type=FORM), tags_asked),
        (Asked(body=TWICE), abort_asked),
    ],
)
def test_what_would_do_more_than_was_meant(asked: Asked, read: Any) -> None:
    """`curl -d mode=keep`, where the body is not looked at; a list that another one hides."""
    with pytest.raises(BadBody):
        read(asked)


@pytest.mark.parametrize("read", [pause_asked, sleep_asked, tags_asked, reset_asked])
def test_a_parameter_that_is_not_known_is_no_default(read: Any) -> None:
    """`mod=wait` would be the abort of all requests."""
    with pytest.raises(Invalid, match="not permitted") as refused:
        read(Asked(query=(("mod", "wait"),)))
    assert "wait" not in str(refused.value)
    assert "'mod'" not in str(refused.value)


async def test_a_pause_that_is_misspelt_is_refused(vllm: Layered) -> None:
    refused = await vllm.post("/pause?mod=wait")
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, 400, "query")
    assert await vllm.operations() == []


def test_parameters_that_clients_send_for_nothing_are_taken() -> None:
    assert sleep_asked(Asked(query=(("level", "1"), ("tags", "weights")))).level == 1
    reset_asked(Asked(query=(("device", "gpu"),)))


def test_a_form_may_repeat_what_takes_effect() -> None:
    body = b"mode=keep&clear_cache=True&other=1"
    found = pause_asked(Asked(query=(("mode", "keep"),), body=body, content_type=FORM))
    assert found.mode is PauseMode.KEEP


def test_what_can_be_read() -> None:
    asked = Asked(query=(("n", "1"), ("n", "2"), ("b", "NO")), body=b"null")
    assert asked.number("n", default=0, least=0, most=2) == 2
    assert asked.texts("n") == ("1", "2")
    assert asked.flag("b", default=True) is False
    assert asked.word("w", ("a",), "a") == "a"
    assert asked.model(optional=True) == {}
    assert Asked().model(optional=True) == {}


GROUP = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2}
TENSORS: dict[str, Any] = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}


@pytest.mark.parametrize(
    "info",
    [
        [TENSORS],
        {**TENSORS, "names": []},
        {**TENSORS, "shapes": [[1], [2]]},
        {**TENSORS, "shapes": [["1"]]},
        {**TENSORS, "shapes": ["1"]},
        {**TENSORS, "dtype_names": ["complex256"]},
        {**TENSORS, "ipc_handles_pickled": "gASV"},
        {"path": "/x"},
    ],
)
def test_pieces_of_a_group_that_are_none(info: Any) -> None:
    group = transfer_of(GROUP, {"nccl"})
    with pytest.raises((Invalid, BadBody)):
        piece_of(info, group)


@pytest.mark.parametrize(
    "info", [{}, {"path": "x"}, {"path": "/"}, {"path": "/x", "files": {"a": 1}}, "x", TENSORS]
)
def test_pieces_on_disk_that_are_none(info: Any) -> None:
    with pytest.raises((Invalid, BadBody)):
        piece_of(info, None)


def test_an_engine_that_only_knows_groups_has_to_be_told_of_one() -> None:
    with pytest.raises(BadBody):
        transfer_of({}, {"nccl"})
    assert transfer_of({}, {"nccl", "disk"}) is None
