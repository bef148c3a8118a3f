"""Wire requests against the model's limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from app.reference_engine.errors import InvalidRequest, UnsupportedRequest
from app.reference_engine.intake import Intake
from app.reference_engine.messages import Logprobs, Sampling, Stopping
from app.reference_engine.tokenizer import Tokenizer
from app.rpc.openengine.v1 import generation_pb2 as pb

VOCABULARY = 600
LONGEST = 50


@pytest.fixture(scope="module")
def intake(tiny: Path) -> Intake:
    return Intake(
        tokenizer=Tokenizer.load(tiny),
        vocab_size=VOCABULARY,
        max_model_len=LONGEST,
        draw_seed=lambda: 77,
    )


def request(change: Callable[[pb.GenerateRequest], object] = lambda _: None) -> pb.GenerateRequest:
    made = pb.GenerateRequest(request_id="a", model="m")
    made.token_ids.ids.extend([1, 2, 3])
    change(made)
    return made


def test_what_is_not_said_is_the_usual(intake: Intake) -> None:
    read = intake.read(request())
    assert read.prompt_ids == (1, 2, 3)
    assert read.sampling == Sampling(seed=77)
    assert read.stopping == Stopping(max_tokens=LONGEST - 3)
    assert read.logprobs is None
    assert not read.bypass_prefix_cache
    assert read.cache_salt == ""


def test_everything_that_can_be_said(intake: Intake) -> None:
    made = pb.GenerateRequest(request_id="a", prompt=" full ahead")
    made.sampling.temperature = 0.0
    made.sampling.top_k = 5
    made.sampling.top_p = 0.5
    made.sampling.min_p = 0.1
    made.sampling.frequency_penalty = -2.0
    made.sampling.presence_penalty = 2.0
    made.sampling.repetition_penalty = 1.5
    made.sampling.seed = 0
    made.sampling.num_sequences = 1
    made.stopping.max_tokens = 9
    made.stopping.min_tokens = 4
    made.stopping.conditions.add().stop_text = "x"
    made.stopping.conditions.add().stop_token_id = 7
    made.stopping.ignore_eos = True
    made.stopping.include_stop_in_output = True
    made.response.return_output_logprobs = True
    made.response.output_candidates.top_n = 2
    made.kv.bypass_prefix_cache = True
    made.kv.cache_salt = "tenant"
    read = intake.read(made)
    assert read.prompt_ids == intake.tokenizer.encode(" full ahead")
    assert read.sampling == Sampling(
        temperature=0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        frequency_penalty=-2,
        presence_penalty=2,
        repetition_penalty=1.5,
        seed=0,
    )
    assert read.stopping == Stopping(
        max_tokens=9,
        min_tokens=4,
        stop_texts=("x",),
        stop_token_ids=(7,),
        ignore_eos=True,
        include_stop_in_output=True,
    )
    assert read.logprobs == Logprobs(top_n=2)
    assert (read.bypass_prefix_cache, read.cache_salt) == (True, "tenant")


@pytest.mark.parametrize(("top_k", "limit"), [(-1, 0), (0, 0), (3, 3)])
def test_no_limit_has_two_spellings(intake: Intake, top_k: int, limit: int) -> None:
    assert (
        intake.read(request(lambda r: setattr(r.sampling, "top_k", top_k))).sampling.top_k == limit
    )


def test_a_longer_wish_than_there_is_room_ends_at_the_room(intake: Intake) -> None:
    read = intake.read(request(lambda r: setattr(r.stopping, "max_tokens", 10_000)))
    assert read.stopping.max_tokens == LONGEST - 3


def test_named_candidates(intake: Intake) -> None:
    read = intake.read(request(lambda r: r.response.output_candidates.token_ids.ids.append(4)))
    assert read.logprobs == Logprobs(token_ids=(4,))
    read = intake.read(request(lambda r: setattr(r.response, "return_output_logprobs", True)))
    assert read.logprobs == Logprobs()


def set_prompt(text: str) -> Callable[[pb.GenerateRequest], object]:
    return lambda r: setattr(r, "prompt", text)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: r.token_ids.ids.append(VOCABULARY), "token_ids"),
        (lambda r: r.token_ids.ids.extend([1] * LONGEST), "prompt"),
        (lambda r: r.token_ids.Clear(), "prompt"),
        (set_prompt("a" * 100_000), "prompt"),
        (set_prompt("XY" * 30), "prompt"),
        (lambda r: setattr(r.sampling, "temperature", -0.1), "sampling.temperature"),
        (lambda r: setattr(r.sampling, "temperature", float("inf")), "sampling.temperature"),
        (lambda r: setattr(r.sampling, "top_p", 0.0), "sampling.top_p"),
        (lambda r: setattr(r.sampling, "top_p", 1.1), "sampling.top_p"),
        (lambda r: setattr(r.sampling, "top_p", float("nan")), "sampling.top_p"),
        (lambda r: setattr(r.sampling, "top_k", -2), "sampling.top_k"),
        (lambda r: setattr(r.sampling, "min_p", 1.5), "sampling.min_p"),
        (lambda r: setattr(r.sampling, "frequency_penalty", 3), "sampling.frequency_penalty"),
        (lambda r: setattr(r.sampling, "presence_penalty", -3), "sampling.presence_penalty"),
        (lambda r: setattr(r.sampling, "repetition_penalty", 0), "sampling.repetition_penalty"),
        (lambda r: setattr(r.sampling, "num_sequences", 0), "sampling.num_sequences"),
        (lambda r: setattr(r.stopping, "max_tokens", 0), "stopping.max_tokens"),
        (lambda r: setattr(r.stopping, "min_tokens", LONGEST), "stopping.min_tokens"),
        (lambda r: r.stopping.conditions.add(), "stopping.conditions"),
        (
            lambda r: setattr(r.stopping.conditions.add(), "stop_text", ""),
            "stopping.conditions.stop_text",
        ),
        (
            lambda r: setattr(r.stopping.conditions.add(), "stop_text", "x" * 1025),
            "stopping.conditions.stop_text",
        ),
        (
            lambda r: setattr(r.stopping.conditions.add(), "stop_token_id", VOCABULARY),
            "stopping.conditions.stop_token_id",
        ),
        (
            lambda r: r.stopping.conditions.extend([pb.StopCondition(stop_token_id=1)] * 65),
            "stopping.conditions",
        ),
        (
            lambda r: setattr(r.response.output_candidates, "top_n", 21),
            "response.output_candidates.top_n",
        ),
        (
            lambda r: r.response.output_candidates.token_ids.ids.append(VOCABULARY),
            "response.output_candidates.token_ids",
        ),
    ],
)
def test_what_can_never_be_served_is_refused_by_field(
    intake: Intake, change: Callable[[pb.GenerateRequest], object], field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        intake.read(request(change))
    assert raised.value.field == field
    assert not isinstance(raised.value, UnsupportedRequest)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: setattr(r.sampling, "num_sequences", 2),
        lambda r: r.response.output_candidates.all.SetInParent(),
    ],
)
def test_what_this_engine_does_not_offer(
    intake: Intake, change: Callable[[pb.GenerateRequest], object]
) -> None:
    with pytest.raises(UnsupportedRequest):
        intake.read(request(change))
