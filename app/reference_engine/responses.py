"""The engine's reports in wire form."""

from __future__ import annotations

from app.reference_engine import messages as m
from app.rpc.openengine.v1 import error_pb2
from app.rpc.openengine.v1 import generation_pb2 as pb

_REASONS = {
    m.FinishReason.STOP: pb.FINISH_REASON_STOP,
    m.FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    m.FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


def response_of(report: m.RequestReport) -> pb.GenerateResponse:
    """One response for each report; usage is on the last one alone."""
    match report:
        case m.Tokens():
            output = pb.TokenOutput(
                output_index=0, tokens=[_token(one) for one in report.tokens], text=report.text
            )
            return pb.GenerateResponse(request_id=report.request_id, token=output)
        case m.Finished():
            finished = pb.GenerationFinished(
                output_index=0, reason=_REASONS[report.reason], message=report.message
            )
            if report.stop is not None:
                finished.stop_match.CopyFrom(_stop(report.stop))
            return pb.GenerateResponse(
                request_id=report.request_id, finished=finished, usage=usage_of(report.usage)
            )
        case m.Failed():
            error = error_pb2.EngineError(
                code=error_pb2.ERROR_CODE_INTERNAL,
                message=report.message,
                retryable=report.retryable,
            )
            usage = None if report.usage is None else usage_of(report.usage)
            return pb.GenerateResponse(request_id=report.request_id, error=error, usage=usage)
        case m.Prefilled():
            raise TypeError("what was prefilled is told with its session")


def _token(token: m.OutputToken) -> pb.TokenInfo:
    return pb.TokenInfo(
        token_id=token.token_id,
        token=token.text,
        logprob=token.logprob,
        rank=token.place,
        candidates=[
            pb.LogProb(token_id=one.token_id, token=one.text, logprob=one.logprob, rank=one.place)
            for one in token.candidates
        ],
    )


def _stop(stop: m.StopMatch) -> pb.StopMatch:
    match stop.kind:
        case m.StopKind.TOKEN:
            return pb.StopMatch(stop_token_id=stop.token_id)
        case m.StopKind.TEXT:
            return pb.StopMatch(stop_text=stop.text)
        case m.StopKind.EOS:
            return pb.StopMatch(eos_token_id=stop.token_id)


def usage_of(usage: m.Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
    )
