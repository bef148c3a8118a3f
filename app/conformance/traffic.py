"""Requests to the inference listener, to see what orders do to them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from app.conformance.case import NotApplicable, NotHeld, expect
from app.conformance.connection import Listener, Metadata
from app.conformance.orders import named
from app.conformance.record import Record, Refusal
from app.rpc.openengine.v1 import error_pb2, generation_pb2, model_pb2, openengine_pb2_grpc

_PROMPT = "the captain orders half ahead and the engine room repeats the order"
_SAMPLE_TOKENS = 32
_FEWEST_TOKENS = 16
# Where the engine does not say how long an output may be.
_USUAL_LIMIT = 1_024
_ROOM_FOR_PROMPT = 128
# Without news for so long, a request counts as standing still.
STILL_S = 0.6
_IN_TRANSIT_S = 0.2


class Generation:
    """One request, read in the background. `end` is None while it runs, then STOP, LENGTH,
    CANCELLED, or the name of the ErrorCode or gRPC status."""

    def __init__(self, call: Any, request_id: str, record: Record, asked: int) -> None:
        self.request_id = request_id
        self.asked = asked
        self.tokens = 0
        self.text = ""
        self.ids: list[int] = []
        self.end: str | None = None
        self.refusal: Refusal | None = None
        self.began_at: float | None = None
        self.ended_at: float | None = None
        self._record = record
        self._call = call
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        end: str | None = None
        try:
            async for response in self._call:
                self._record.heard("Generate", response)
                match response.WhichOneof("event"):
                    case "token":
                        self.tokens += max(1, len(response.token.tokens))
                        self.text += response.token.text
                        self.ids += [one.token_id for one in response.token.tokens]
                    case "finished":
                        reason = named(generation_pb2.FinishReason, response.finished.reason)
                        end = reason.removeprefix("FINISH_REASON_")
                    case "error":
                        code = named(error_pb2.ErrorCode, response.error.code)
                        end = code.removeprefix("ERROR_CODE_")
                if self.tokens and self.began_at is None:
                    self.began_at = asyncio.get_running_loop().time()
                self._news.set()
        except grpc.aio.AioRpcError as error:
            self.refusal = self._record.refused("Generate", error)
            end = error.code().name
        finally:
            self.ended_at = asyncio.get_running_loop().time()
            self.end = end or "the stream ended without saying how"
            self._news.set()

    def __str__(self) -> str:
        return f"{self.tokens} of {self.asked} tokens, {self.end or 'still running'}"

    @property
    def whole(self) -> bool:
        """It ran to an end of its own."""
        return self.end in ("STOP", "LENGTH")

    async def begun(self, within_s: float) -> None:
        """Until a token has come. Raises NotHeld."""
        try:
            async with asyncio.timeout(within_s):
                while not self.tokens and self.end is None:
                    await self._news.wait()
                    self._news.clear()
        except TimeoutError:
            pass
        if not self.tokens:
            raise NotHeld("a request to be answered while admission is open", str(self))

    async def over(self, within_s: float, when: str) -> None:
        """Until it has ended. Raises NotHeld."""
        _, waiting = await asyncio.wait({self._task}, timeout=within_s)
        if waiting:
            raise NotHeld(f"the request to end {when}", str(self))

    async def stands_still(self) -> bool:
        """Whether nothing comes for a while, in which it does not end either."""
        await asyncio.sleep(_IN_TRANSIT_S)
        before = (self.tokens, self.end)
        await asyncio.sleep(STILL_S)
        return (self.tokens, self.end) == before

    def hang_up(self) -> None:
        self._call.cancel()


class Traffic:
    """Requests of a known length in time: how fast the engine generates is measured once."""

    def __init__(self, listener: Listener, record: Record, patience_s: float) -> None:
        self.listener = listener
        self.channel = listener.channel()
        self._record = record
        self._patience_s = patience_s
        self._inference: Any = openengine_pb2_grpc.InferenceStub(self.channel)
        self._control: Any = openengine_pb2_grpc.ControlStub(self.channel)
        self._under_way: list[Generation] = []
        self._limit = 0
        self._tokens_a_second = 0.0
        self._stretch = 1.0

    async def close(self) -> None:
        self.hang_up()
        await self.channel.close()

    def hang_up(self) -> None:
        for generation in self._under_way:
            generation.hang_up()
        self._under_way.clear()

    def ask(self, tokens: int, *, metadata: Metadata | None = None, lora: str = "") -> Generation:
        """A new request for exactly that many tokens, under that adapter."""
        request = generation_pb2.GenerateRequest(
            request_id=f"conformance-{uuid.uuid4()}",
            prompt=_PROMPT,
            # The likeliest tokens, so that the same question has the same answer.
            sampling=generation_pb2.SamplingParams(temperature=0.0),
            stopping=generation_pb2.StoppingOptions(max_tokens=tokens, ignore_eos=True),
            lora_name=lora,
        )
        call = self._inference.Generate(
            request,
            timeout=20 * self._patience_s,
            metadata=self.listener.metadata if metadata is None else metadata,
        )
        generation = Generation(call, request.request_id, self._record, tokens)
        self._under_way.append(generation)
        return generation

    async def tokens_for(self, seconds: float) -> int:
        """So many that a request takes about that long, or as long as the engine admits."""
        if not self._tokens_a_second:
            await self._measure()
        wanted = int(self._tokens_a_second * seconds * self._stretch)
        return min(self._limit, max(_FEWEST_TOKENS, wanted))

    @contextmanager
    def stretched(self, times: float) -> Generator[None]:
        """All requests so many times as long as they are asked to be."""
        self._stretch = times
        try:
            yield
        finally:
            self._stretch = 1.0

    async def _measure(self) -> None:
        limit = await self._longest()
        sample = self.ask(min(_SAMPLE_TOKENS, limit))
        await sample.over(self._patience_s, "while admission is open")
        if not sample.whole or sample.began_at is None or sample.ended_at is None:
            raise NotHeld("a short request to be answered while admission is open", str(sample))
        took_s = max(1e-4, sample.ended_at - sample.began_at)
        self._tokens_a_second = sample.tokens / took_s
        self._limit = limit

    async def _longest(self) -> int:
        try:
            model: model_pb2.ModelInfo = await self._control.GetModelInfo(
                model_pb2.GetModelInfoRequest(),
                timeout=self._patience_s,
                metadata=self.listener.metadata,
            )
        except grpc.aio.AioRpcError:
            return _USUAL_LIMIT
        limits = []
        if model.max_output_tokens:
            limits.append(model.max_output_tokens)
        if model.max_context_length:
            limits.append(max(_FEWEST_TOKENS, model.max_context_length - _ROOM_FOR_PROMPT))
        return min(limits, default=_USUAL_LIMIT)

    @asynccontextmanager
    async def running(self, seconds: float, *, lora: str = "") -> AsyncGenerator[Generation]:
        """A request that has begun and goes on for about so long, if nothing ends it."""
        generation = self.ask(await self.tokens_for(seconds), lora=lora)
        try:
            await generation.begun(self._patience_s)
            yield generation
        finally:
            generation.hang_up()


class TooShort(NotApplicable):
    """A request had ended before the order came that should have met it."""

    def __init__(self) -> None:
        super().__init__("requests of this engine end too soon to give an order in their midst")


def expect_going_on(generation: Generation) -> None:
    """Raises NotHeld; TooShort when it has come to an end of its own."""
    if generation.whole:
        raise TooShort
    expect(generation.end is None, "the request to go on", generation)
