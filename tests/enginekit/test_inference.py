"""Requests: what is refused before it is taken on, how the rest ends, and whose they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from app.enginekit.runtime import Feature
from app.rpc.openengine.v1 import error_pb2, generation_pb2, kv_pb2, lifecycle_pb2
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client, Generation, client_of, refusal_of, until
from tests.enginekit.minimal_engine import MODEL, MinimalEngine

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode
g = generation_pb2


def send(client: Client, request: g.GenerateRequest) -> Generation:
    return Generation(client.inference.Generate(request, timeout=10), request.request_id)


async def test_a_request_without_an_id_gets_one(client: Client) -> None:
    request = send(client, g.GenerateRequest(prompt="a b"))
    end = await request.end()
    assert end.request_id
    assert {response.request_id for response in request.responses} == {end.request_id}
    named = send(client, g.GenerateRequest(prompt="a", request_id="mine", model=MODEL))
    assert (await named.end()).request_id == "mine"


MALFORMED: dict[str, tuple[g.GenerateRequest, str]] = {
    "no input": (g.GenerateRequest(), "prompt"),
    "empty prompt": (g.GenerateRequest(prompt=""), "prompt"),
    "no tokens": (g.GenerateRequest(token_ids=g.TokenIds()), "token_ids"),
    "long id": (g.GenerateRequest(prompt="a", request_id="x" * 300), "request_id"),
    "temperature": (
        g.GenerateRequest(prompt="a", sampling=g.SamplingParams(temperature=-1)),
        "sampling.temperature",
    ),
    "not a number": (
        g.GenerateRequest(prompt="a", sampling=g.SamplingParams(temperature=float("nan"))),
        "sampling.temperature",
    ),
    "top_p": (g.GenerateRequest(prompt="a", sampling=g.SamplingParams(top_p=0)), "sampling.top_p"),
    "top_k": (g.GenerateRequest(prompt="a", sampling=g.SamplingParams(top_k=-2)), "sampling.top_k"),
    "min_p": (g.GenerateRequest(prompt="a", sampling=g.SamplingParams(min_p=2)), "sampling.min_p"),
    "repetition": (
        g.GenerateRequest(prompt="a", sampling=g.SamplingParams(repetition_penalty=0)),
        "sampling.repetition_penalty",
    ),
    "no sequence": (
        g.GenerateRequest(prompt="a", sampling=g.SamplingParams(num_sequences=0)),
        "sampling.num_sequences",
    ),
    "no tokens wanted": (
        g.GenerateRequest(prompt="a", stopping=g.StoppingOptions(max_tokens=0)),
        "stopping.max_tokens",
    ),
    "least above most": (
        g.GenerateRequest(prompt="a", stopping=g.StoppingOptions(max_tokens=1, min_tokens=2)),
        "stopping.min_tokens",
    ),
    "more than the engine gives": (
        g.GenerateRequest(prompt="a", stopping=g.StoppingOptions(max_tokens=99999)),
        "stopping.max_tokens",
    ),
    "empty stop": (
        g.GenerateRequest(prompt="a", stopping=g.StoppingOptions(conditions=[g.StopCondition()])),
        "stopping.conditions[0]",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_requests(name: str, client: Client, double: EngineDouble) -> None:
    request, field = MALFORMED[name]
    seen = await send(client, request).refused()
    assert (seen.code, seen.reason, seen.domain) == (
        Code.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "chadburn",
    )
    assert seen.fields == (field,)
    assert double.engine.started == []


async def test_a_model_that_is_not_served(client: Client) -> None:
    seen = await send(client, g.GenerateRequest(prompt="a", model="other")).refused()
    assert (seen.code, seen.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")


NEEDS: dict[Feature, g.GenerateRequest] = {
    Feature.MIN_P: g.GenerateRequest(sampling=g.SamplingParams(min_p=0.5)),
    Feature.FREQUENCY_PENALTY: g.GenerateRequest(sampling=g.SamplingParams(frequency_penalty=1.0)),
    Feature.PRESENCE_PENALTY: g.GenerateRequest(sampling=g.SamplingParams(presence_penalty=1.0)),
    Feature.REPETITION_PENALTY: g.GenerateRequest(
        sampling=g.SamplingParams(repetition_penalty=1.5)
    ),
    Feature.PARALLEL_SEQUENCES: g.GenerateRequest(sampling=g.SamplingParams(num_sequences=2)),
    Feature.PROMPT_LOGPROBS: g.GenerateRequest(
        response=g.ResponseOptions(return_prompt_logprobs=True)
    ),
    Feature.OUTPUT_LOGPROBS: g.GenerateRequest(
        response=g.ResponseOptions(output_candidates=g.CandidateTokenSelection(top_n=2))
    ),
    Feature.PREFIX_CACHE_BYPASS: g.GenerateRequest(kv=g.KvOptions(bypass_prefix_cache=True)),
    Feature.CACHE_SALT: g.GenerateRequest(kv=g.KvOptions(cache_salt="x")),
    Feature.KV_SESSION: g.GenerateRequest(kv=g.KvOptions(session=kv_pb2.KvSessionRef())),
    Feature.GUIDED_DECODING: g.GenerateRequest(guided=g.GuidedDecoding(regex="a")),
    Feature.MEDIA: g.GenerateRequest(media=[g.MediaItem(url="https://example.com/a.png")]),
    Feature.LORA: g.GenerateRequest(lora_name="adapter"),
}


@pytest.mark.parametrize("feature", list(Feature), ids=lambda feature: feature.value)
async def test_what_an_engine_does_not_know_is_refused_and_not_left_out(
    feature: Feature, client: Client, double: EngineDouble
) -> None:
    request = NEEDS[feature]
    request.prompt = "a"
    seen = await send(client, request).refused()
    assert (seen.code, seen.reason) == (Code.UNIMPLEMENTED, "UNSUPPORTED_FEATURE")
    assert feature.value in seen.message
    double.engine.features = frozenset({feature})
    assert (await send(client, request).end()).HasField("finished")


async def test_values_that_ask_for_nothing_need_no_feature(client: Client) -> None:
    sampling = g.SamplingParams(
        min_p=0, frequency_penalty=0, presence_penalty=0, repetition_penalty=1, num_sequences=1
    )
    plain = g.GenerateRequest(
        prompt="a",
        sampling=sampling,
        kv=g.KvOptions(bypass_prefix_cache=False, cache_salt=""),
        response=g.ResponseOptions(return_output_logprobs=False),
    )
    assert (await send(client, plain).end()).HasField("finished")


async def test_limits_of_what_is_offered(client: Client, double: EngineDouble) -> None:
    double.engine.features = frozenset(Feature)
    for request, field in (
        (
            g.GenerateRequest(prompt="a", sampling=g.SamplingParams(num_sequences=5)),
            "sampling.num_sequences",
        ),
        (
            g.GenerateRequest(
                prompt="a",
                response=g.ResponseOptions(prompt_candidates=g.CandidateTokenSelection(top_n=6)),
            ),
            "response.prompt_candidates.top_n",
        ),
    ):
        seen = await send(client, request).refused()
        assert (seen.code, seen.fields) == (Code.INVALID_ARGUMENT, (field,))


async def test_an_id_in_use_is_refused(client: Client, double: EngineDouble) -> None:
    double.engine.stall()
    first = client.generate(request_id="same")
    await first.first()
    seen = await client.generate(request_id="same").refused()
    assert (seen.code, seen.reason) == (Code.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    await client.completed(client.pause("keep"))
    assert (await client.generate(request_id="same").refused()).reason == "DUPLICATE_REQUEST"
    double.engine.go()
    first.hang_up()


async def test_a_runtime_that_refuses(client: Client) -> None:
    seen = await client.generate("refuse").refused()
    assert (seen.code, seen.reason, seen.message) == (
        Code.RESOURCE_EXHAUSTED,
        "OVERLOADED",
        "no room",
    )
    assert seen.metadata["retryable"] == "true"


async def test_an_engine_without_its_ranks_is_unavailable_for_a_while(client: Client) -> None:
    seen = await client.generate("lost").refused()
    assert (seen.code, seen.reason) == (Code.UNAVAILABLE, "INTERNAL")
    assert seen.metadata["retryable"] == "true"


async def test_a_runtime_that_breaks(client: Client) -> None:
    """Before the first response a status, after it an event; and never the text of the fault."""
    seen = await client.generate("explode").refused()
    assert (seen.code, seen.reason) == (Code.INTERNAL, "INTERNAL")
    assert "secret" not in seen.message
    end = await client.generate("one explode").end()
    assert end.error.code == error_pb2.ErrorCode.ERROR_CODE_INTERNAL
    assert "secret" not in end.error.message
    end = await client.generate("one refuse").end()
    assert end.error.code == error_pb2.ErrorCode.ERROR_CODE_KV_TRANSFER_FAILED
    assert end.error.retryable


async def test_a_client_that_leaves_frees_its_place(client: Client, double: EngineDouble) -> None:
    double.engine.stall()
    running = client.generate()
    await running.first()
    running.hang_up()
    await until(lambda: double.engine.running == 0)
    assert (await client.completed(client.pause())).pause.requests_finished == 0


async def test_a_message_above_the_limit_is_refused(tmp_path: Path) -> None:
    async with (
        running_engine(tmp_path, max_message_bytes=10_000) as double,
        client_of(double) as client,
    ):
        assert (await client.profile()).limits.max_message_bytes == 10_000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.generate("x" * 20_000).end()
        assert caught.value.code() is Code.RESOURCE_EXHAUSTED
        big = client.pause(idempotency_key="k" * 20_000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.order(big)
        assert caught.value.code() is Code.RESOURCE_EXHAUSTED
        assert await client.generate().finish_reason() == "LENGTH"


# ---- ending requests ----


async def abort(stub: Any, **target: Any) -> lifecycle_pb2.AbortResponse:
    answer: lifecycle_pb2.AbortResponse = await stub.Abort(
        lifecycle_pb2.AbortRequest(**target), timeout=10
    )
    return answer


Status = lifecycle_pb2.AbortStatus


async def test_abort_by_id(client: Client, double: EngineDouble) -> None:
    double.engine.stall()
    for stub in (client.control, client.reading):
        running = client.generate()
        await running.first()
        answer = await abort(stub, request_id=running.request_id)
        assert answer.status == Status.ABORT_STATUS_ABORTED
        assert await running.finish_reason() == "CANCELLED"
        again = await abort(stub, request_id=running.request_id)
        assert again.status == Status.ABORT_STATUS_ALREADY_FINISHED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await abort(stub, request_id="never seen")
        seen = refusal_of(caught.value)
        assert (seen.code, seen.reason) == (Code.NOT_FOUND, "REQUEST_NOT_FOUND")


async def test_abort_of_held_and_of_frozen_requests(client: Client, double: EngineDouble) -> None:
    double.engine.stall()
    frozen = client.generate()
    await frozen.first()
    await client.completed(client.pause("keep"))
    held = client.generate()
    await client.held(1)
    for request in (held, frozen):
        answer = await abort(client.control, request_id=request.request_id)
        assert answer.status == Status.ABORT_STATUS_ABORTED
        assert await request.finish_reason() == "CANCELLED"
    assert (await held.end()).finished.message == "aborted by an administrator"
    assert (await client.profile()).state.pause.requests_held == 0


async def test_abort_of_everything(client: Client, double: EngineDouble) -> None:
    double.engine.stall()
    running = [client.generate() for _ in range(3)]
    for request in running:
        await request.first()
    await client.completed(client.pause("keep"))
    held = client.generate()
    await client.held(1)
    answer = await abort(client.control, all_requests=lifecycle_pb2.AllRequests())
    assert (answer.status, answer.message) == (Status.ABORT_STATUS_ABORTED, "4 requests aborted")
    for request in (*running, held):
        assert await request.finish_reason() == "CANCELLED"
    answer = await abort(client.control, all_requests=lifecycle_pb2.AllRequests())
    assert answer.status == Status.ABORT_STATUS_ALREADY_FINISHED, "nothing was left to abort"


async def test_an_abort_that_fails_is_not_said_to_have_worked(
    client: Client, double: EngineDouble
) -> None:
    double.engine.stall()
    running = client.generate()
    await running.first()
    double.engine.stuck = True
    for target in (
        {"request_id": running.request_id},
        {"all_requests": lifecycle_pb2.AllRequests()},
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await abort(client.control, **target)
        assert refusal_of(caught.value).reason == "INTERNAL"
    double.engine.stuck = False
    await abort(client.control, request_id=running.request_id)
    assert await running.finish_reason() == "CANCELLED"


async def test_what_an_abort_must_name(client: Client) -> None:
    for request in (lifecycle_pb2.AbortRequest(), lifecycle_pb2.AbortRequest(request_id="")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.control.Abort(request, timeout=10)
        assert caught.value.code() is Code.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await abort(client.control, kv_session=kv_pb2.KvSessionRef())
    assert refusal_of(caught.value).reason == "UNSUPPORTED_FEATURE"


async def test_abort_of_everything_belongs_to_the_admin_listener(
    client: Client, double: EngineDouble
) -> None:
    double.engine.stall()
    running = client.generate()
    await running.first()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await abort(client.reading, all_requests=lifecycle_pb2.AllRequests())
    seen = refusal_of(caught.value)
    assert (seen.code, seen.reason) == (Code.PERMISSION_DENIED, "ADMIN_LISTENER_ONLY")
    double.engine.go()
    assert await running.finish_reason() == "LENGTH"


def test_every_feature_is_tried() -> None:
    assert set(NEEDS) == set(Feature)
    assert MinimalEngine().features == frozenset()
