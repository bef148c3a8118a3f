"""One rank's core in this process: what a damaged model does, and reports in wire form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.reference_engine import messages as m
from app.reference_engine.core import EngineCore
from app.reference_engine.errors import OrderRefused
from app.reference_engine.holding import Holding
from app.reference_engine.kv_cache import BlockPool
from app.reference_engine.model import KvCache
from app.reference_engine.responses import response_of
from app.reference_engine.scheduler import Scheduler, SchedulerLimits
from app.reference_engine.tokenizer import Tokenizer
from app.reference_engine.weights import LM_HEAD
from app.rpc.openengine.v1 import error_pb2, generation_pb2
from tests.reference_engine.checkpoints import ours

USAGE = m.Usage(prompt_tokens=4, completion_tokens=3, cached_prompt_tokens=2)


@pytest.fixture
def damaged(tiny: Path) -> EngineCore:
    """One value of the head is not a number."""
    config, model = ours(tiny, 128)
    head = model.weights[LM_HEAD].clone()
    head[5, 5] = torch.nan
    limits = SchedulerLimits(block_size=16, max_running=4, max_waiting=4, max_batched_tokens=64)
    scheduler = Scheduler(limits, BlockPool(8))
    holding = Holding(model, {**model.weights, LM_HEAD: head}, lambda: KvCache(config, 8, 16))
    return EngineCore(scheduler, holding, Tokenizer.load(tiny))


def test_damaged_model_fails_its_requests_and_not_the_rank(damaged: EngineCore) -> None:
    request = m.GenerationRequest(
        request_id="a",
        prompt_ids=(1, 2, 3),
        sampling=m.Sampling(),
        stopping=m.Stopping(max_tokens=5),
    )
    for _ in range(2):
        assert damaged.apply(m.Submit(request)) == (m.Submitted(m.SubmitStatus.ACCEPTED), [])
        (failed,) = damaged.step()
        assert isinstance(failed, m.Failed)
        assert (failed.request_id, failed.retryable) == ("a", False)
        assert failed.usage == m.Usage(prompt_tokens=3, completion_tokens=0, cached_prompt_tokens=0)
        load, _ = damaged.apply(m.ReadLoad())
        assert isinstance(load, m.LoadNumbers)
        assert (load.running_requests, load.used_kv_blocks) == (0, 0)
    with pytest.raises(OrderRefused, match="finite"):
        damaged.apply(m.Probe())


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (
            m.StopMatch(m.StopKind.TOKEN, token_id=9),
            generation_pb2.StopMatch(stop_token_id=9),
        ),
        (m.StopMatch(m.StopKind.TEXT, text="x"), generation_pb2.StopMatch(stop_text="x")),
        (m.StopMatch(m.StopKind.EOS, token_id=1), generation_pb2.StopMatch(eos_token_id=1)),
    ],
)
def test_stops_say_what_matched(stop: m.StopMatch, expected: generation_pb2.StopMatch) -> None:
    report = m.Finished(request_id="a", reason=m.FinishReason.STOP, usage=USAGE, stop=stop)
    response = response_of(report)
    assert response.finished.stop_match == expected
    assert response.finished.HasField("output_index")
    assert response.usage.total_tokens == 7


def test_failures_carry_what_was_used_where_that_is_known() -> None:
    lost = response_of(m.Failed(request_id="a", message="gone", retryable=True))
    assert lost.error == error_pb2.EngineError(
        code=error_pb2.ERROR_CODE_INTERNAL, message="gone", retryable=True
    )
    assert not lost.HasField("usage")
    known = m.Failed(request_id="a", message="no", retryable=False, usage=USAGE)
    assert response_of(known).usage.cached_prompt_tokens == 2


def test_tokens_say_their_index_and_their_scores() -> None:
    candidate = m.Candidate(token_id=3, text="c", logprob=-0.5, place=1)
    token = m.OutputToken(token_id=4, text="d", logprob=-1.5, place=2, candidates=(candidate,))
    plain = m.OutputToken(token_id=5, text="e")
    output = response_of(m.Tokens(request_id="a", tokens=(token, plain), text="de")).token
    assert output.HasField("output_index")
    assert (output.tokens[0].rank, output.tokens[0].logprob) == (2, -1.5)
    assert output.tokens[0].candidates[0].rank == 1
    assert not output.tokens[1].HasField("logprob")
