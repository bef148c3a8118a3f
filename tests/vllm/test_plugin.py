"""The plugin in real vLLM: weights from disk change what is generated, and nothing else does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.asking import Said, generate, get, post, streaming
from tests.real.servers import Server
from tests.vllm.servers import serving


@pytest.fixture(scope="module")
def of_b(models: Path) -> Said:
    """What an engine says that was started with `b`."""
    with serving(models / "b") as server:
        return generate(server)


@pytest.fixture(scope="module")
def engine(of_b: Said, models: Path) -> Iterator[Server]:
    """An engine that was started with `a`, once the other has gone."""
    with serving(models / "a") as server:
        yield server


def update(server: Server, version: str = "", **info: object) -> tuple[int, str]:
    """The whole sequence as a trainer sends it, up to the first error."""
    for path, body in (
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": info}),
        ("/finish_weight_update", {"weight_version": version} if version else {}),
    ):
        answer = post(server, path, body)
        if answer.status_code != 200:
            return answer.status_code, answer.json()["error"]["message"]
    return 200, ""


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*.safetensors")
    }


def test_tokens_of_the_new_weights(engine: Server, models: Path, of_b: Said) -> None:
    of_a = generate(engine)
    assert of_a != of_b
    for name, expected in (("b", of_b), ("a", of_a), ("b-sharded", of_b), ("a", of_a)):
        assert update(engine, path=str(models / name), files=digests(models / name)) == (200, "")
        assert generate(engine) == expected, name


def test_the_version_follows(engine: Server, models: Path) -> None:
    file = models / "a" / "model.safetensors"
    assert update(engine, "step-7", path=str(file), check_finite=True) == (200, "")
    assert get(engine, "/weight_info") == {"weight_version": "step-7"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("b-without-one", "missing: model.layers.1.mlp.down_proj.weight"),
        ("b-other-shape", "of another form: model.layers.1.mlp.down_proj.weight (BF16 [128, 64]"),
        ("b-other-dtype", "of another form: model.layers.1.mlp.down_proj.weight (F32 [64, 128]"),
        ("b-not-a-number", "has elements that are not finite"),
        ("not-there", "there is nothing at this path"),
        ("..", "not below an allowed root"),
    ],
)
def test_a_refusal_leaves_a_serving_engine(
    engine: Server, models: Path, name: str, said: str
) -> None:
    """Resumed behind an update that failed, vLLM's own backends end the engine at the next step."""
    before = generate(engine)
    assert post(engine, "/pause", mode="keep").status_code == 200
    status, message = update(engine, "never", path=str(models / name), check_finite=True)
    assert status == 500
    assert said in message
    assert "(weights unchanged)" in message
    assert post(engine, "/resume").status_code == 200
    assert generate(engine) == before
    assert get(engine, "/weight_info") != {"weight_version": "never"}


def test_digests_that_do_not_match(engine: Server, models: Path) -> None:
    wrong = {"model.safetensors": "00" * 32}
    status, message = update(engine, path=str(models / "b"), files=wrong)
    assert (status, "does not have the SHA-256" in message) == (500, True)
    assert engine.is_alive()


def test_under_traffic_and_without_a_pause(engine: Server, models: Path, of_b: Said) -> None:
    """Not what one should do; but the engine lives, and so does the stream."""
    with streaming(engine) as stream:
        assert post(engine, "/start_weight_update").status_code == 200
        assert not stream.ended.is_set()
        body = {"update_info": {"path": str(models / "b")}}
        assert post(engine, "/update_weights", body).status_code == 200
        assert post(engine, "/finish_weight_update", {}).status_code == 200
    assert (stream.finish, stream.error) == ("length", None)
    assert post(engine, "/reset_prefix_cache").json() == {"success": True}
    assert generate(engine) == of_b


def test_an_engine_without_a_root_does_not_start(models: Path) -> None:
    with (
        pytest.raises(AssertionError, match="no root of weights is allowed"),
        serving(models / "a", extra_environment={"CHADBURN_VLLM_ROOTS": ""}),
    ):
        pass
