"""One generation from an engine's inference listener, as plain values."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

import grpc

from app.rpc.openengine.v1 import error_pb2, generation_pb2, kv_pb2, openengine_pb2_grpc

# A held request sends nothing until its pause is lifted, and middleboxes drop quiet connections.
_CHANNEL_OPTIONS = [("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 10_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What to generate. `request_id` is unique among the requests in flight; None leaves a choice
    to the engine, and a `seed` makes the text repeatable. `lora`: an adapter by its name."""

    request_id: str
    prompt: str
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    lora: str = ""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    UNSPECIFIED = "unspecified"


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of the output, and how many tokens it stands for."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of the output. Token counts are the engine's; None: not told."""

    reason: FinishReason
    message: str
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_prompt_tokens: int | None


@dataclass(frozen=True, slots=True)
class KvSession:
    """The KV of one prompt, held by a prefill engine for a while. Whoever has this can fetch it."""

    reference: kv_pb2.KvSessionRef = field(repr=False)


class GenerationRefused(Exception):
    """The engine would not begin or go on. `reason` is the name of its `ErrorCode` or, where the
    call itself was refused, of the gRPC status; `message` is the engine's own."""

    def __init__(self, reason: str, message: str, *, retryable: bool) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.retryable = retryable


class EngineOutOfReach(Exception):
    """No answer: nobody listens at the address, the connection broke, or the time is up."""


class InferenceClient:
    """One channel to one inference listener.

    `address` is `host:port` or `unix:/path`. Plaintext: the bearer token must not leave the
    machine this way, so `address` has to be loopback or a socket; ValueError otherwise. `token`
    None: none is shown, to an engine that takes none.
    """

    def __init__(self, address: str, token: str | None) -> None:
        if not _stays_here(address):
            raise ValueError("a token is only sent in plaintext to this machine itself")
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = openengine_pb2_grpc.InferenceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def generate(
        self, generation: Generation, *, timeout_s: float, session: KvSession | None = None
    ) -> AsyncIterator[Piece | Finished]:
        """Pieces as they come, then exactly one `Finished`. Closing the iterator aborts. A decode
        engine goes on from the `session` of the same prompt.

        Raises GenerationRefused or EngineOutOfReach.
        """
        request = _request(generation)
        if session is not None:
            request.kv.session.CopyFrom(session.reference)
        async with aclosing(self._responses(request, timeout_s)) as responses:
            async for response in responses:
                event = response.WhichOneof("event")
                if event == "token":
                    yield Piece(response.token.text, len(response.token.tokens))
                elif event == "finished":
                    yield _finished(response)
                    return
                elif event == "prefill_ready":
                    message = "this engine does prefill alone: have a decode engine go on"
                    raise GenerationRefused("ROLE_MISMATCH", message, retryable=False)
        raise EngineOutOfReach("the engine ended the stream without saying how")

    async def prefill(self, generation: Generation, *, timeout_s: float) -> KvSession:
        """Have a prefill engine compute the prompt. Raises as `generate`."""
        async with aclosing(self._responses(_request(generation), timeout_s)) as responses:
            async for response in responses:
                match response.WhichOneof("event"):
                    case "prefill_ready":
                        return KvSession(response.prefill_ready.kv_session)
                    case "token":
                        raise GenerationRefused(
                            "ROLE_MISMATCH", "this engine does not prefill alone", retryable=False
                        )
                    case "finished":
                        message = response.finished.message
                        raise GenerationRefused("CANCELLED", message, retryable=False)
        raise EngineOutOfReach("the engine ended the stream without saying how")

    async def _responses(
        self, request: generation_pb2.GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse]:
        """Without errors, which are raised."""
        call = self._stub.Generate(request, metadata=self._metadata, timeout=timeout_s)
        try:
            async for response in call:
                if response.WhichOneof("event") == "error":
                    raise _refused(response.error)
                yield response
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from None
        finally:
            call.cancel()


def _request(generation: Generation) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        request_id=generation.request_id,
        prompt=generation.prompt,
        sampling=generation_pb2.SamplingParams(
            temperature=generation.temperature, seed=generation.seed
        ),
        stopping=generation_pb2.StoppingOptions(max_tokens=generation.max_tokens),
        lora_name=generation.lora,
    )


def _finished(response: generation_pb2.GenerateResponse) -> Finished:
    usage = response.usage if response.HasField("usage") else None
    name = generation_pb2.FinishReason.Name(response.finished.reason)
    cached = usage is not None and usage.HasField("cached_prompt_tokens")
    return Finished(
        reason=FinishReason(name.removeprefix("FINISH_REASON_").lower()),
        message=response.finished.message,
        prompt_tokens=usage.prompt_tokens if usage else None,
        completion_tokens=usage.completion_tokens if usage else None,
        cached_prompt_tokens=usage.cached_prompt_tokens if usage and cached else None,
    )


def _refused(error: error_pb2.EngineError) -> GenerationRefused:
    name = error_pb2.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_")
    return GenerationRefused(name, error.message, retryable=error.retryable)


def _failure(error: grpc.aio.AioRpcError) -> Exception:
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return EngineOutOfReach("the engine did not finish in the time given")
    if code is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():
        return EngineOutOfReach("no engine answers there, or the connection broke")
    retryable = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
    return GenerationRefused(code.name, error.details() or "", retryable=retryable)


def _stays_here(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    return host == "localhost" or host == "::1" or host.startswith("127.")
