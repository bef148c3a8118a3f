"""What is relied on of SGLang itself, seen again on the real one with nothing in front of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real.asking import Said, client, generate, get, post, streaming
from tests.real.servers import Server
from tests.reference_engine.trainers import GROUP
from tests.sglang.tensors import sending, serialized, tensors_of


def told(server: Server, path: str, body: object = None) -> tuple[int, Any]:
    answer = post(server, path, body)
    if answer.headers.get("content-type", "").startswith("application/json"):
        return answer.status_code, answer.json()
    return answer.status_code, answer.text


def test_new_weights_and_the_name_that_changes(engine: Server, models: Path, of_b: Said) -> None:
    of_a = generate(engine)
    for name, said in (("b", of_b), ("a", of_a), ("b-sharded", of_b), ("a", of_a)):
        path = str(models / name)
        status, answer = told(engine, "/update_weights_from_disk", {"model_path": path})
        assert (status, answer["success"]) == (200, True)
        assert generate(engine) == said
        assert get(engine, "/model_info")["served_model_name"] == path


def test_weights_from_tensors_need_a_session(engine: Server, models: Path, of_b: Said) -> None:
    tensors = list(tensors_of(models / "b").items())
    path, body = "/update_weights_from_tensor", {"serialized_named_tensors": [serialized(tensors)]}
    assert told(engine, path, body)[0] == 400
    assert told(engine, "/begin_weight_update", {})[0] == 200
    body = {"serialized_named_tensors": [serialized(tensors)]}
    assert told(engine, path, body) == (200, {"success": True, "message": "Success"})
    assert told(engine, "/end_weight_update", {})[0] == 200
    assert generate(engine) == of_b
    told(engine, "/update_weights_from_disk", {"model_path": str(models / "a")})


def test_weights_from_a_trainer(engine: Server, models: Path, of_b: Said) -> None:
    tensors = tensors_of(models / "b")
    with sending(tensors) as sender:
        group = {
            "master_address": "127.0.0.1", "master_port": sender.port, "rank_offset": 1,
            "world_size": 2, "group_name": GROUP, "backend": "gloo",
        }  # fmt: skip
        assert told(engine, "/init_weights_update_group", group)[0] == 200
        assert told(engine, "/begin_weight_update", {})[0] == 200
        pieces = {
            "names": list(tensors), "dtypes": ["bfloat16"] * len(tensors), "group_name": GROUP,
            "shapes": [list(each.shape) for each in tensors.values()], "weight_version": "w-1",
        }  # fmt: skip
        assert told(engine, "/update_weights_from_distributed", pieces)[0] == 200
        assert told(engine, "/end_weight_update", {})[0] == 200
        assert generate(engine) == of_b
        assert told(engine, "/destroy_weights_update_group", {"group_name": GROUP})[0] == 200
    assert get(engine, "/model_info")["weight_version"] == "w-1"
    told(engine, "/update_weights_from_disk", {"model_path": str(models / "a")})


def test_success_for_tensors_that_are_missing(engine: Server, models: Path) -> None:
    body = {"model_path": str(models / "b-without-one")}
    status, answer = told(engine, "/update_weights_from_disk", body)
    assert (status, answer["success"]) == (200, True)


def test_a_pause_that_health_and_load_do_not_show(engine: Server) -> None:
    with streaming(engine) as stream:
        assert told(engine, "/pause_generation", {"mode": "in_place"})[0] == 200
        assert client(engine).get("/ready").status_code == 503
        assert client(engine).get("/v1/loads").json()["loads"][0]["queues"]["paused"] == 0
        assert told(engine, "/flush_cache")[0] == 400
        assert not stream.ended.is_set()
        assert told(engine, "/continue_generation", {})[0] == 200
    assert (stream.finish, stream.error) == ("length", None)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/pause_generation", None, 400),
        ("/pause_generation", {"mode": "wait"}, 400),
        ("/release_memory_occupation", None, 400),
        ("/end_weight_update", {}, 400),
        ("/update_weights_from_disk", {"model_path": "/not/there"}, 400),
        ("/destroy_weights_update_group", {"group_name": "nobody"}, 400),
        ("/abort_request", {"rid": "nobody"}, 200),
        ("/set_internal_state", {"server_args": {"nothing": 1}}, 200),
        ("/stop_profile", None, 500),
        ("/get_load", None, 404),
    ],
)
def test_statuses(engine: Server, path: str, body: object, status: int) -> None:
    assert told(engine, path, body)[0] == status


def test_it_generates_after_all_of_it(engine: Server) -> None:
    assert engine.is_alive()
