"""The server's side of a trace: each call is a span below the one that its `traceparent` names.
Only where somebody traces; the kit itself needs nothing for it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from app.observability.spans import NO_TRACING, Sent, Span, SpanKind, Tracing

# What a service sets when it refuses; a status that nobody set is OK.
_OK = (None, grpc.StatusCode.OK, 0)
_UNTRACED = "/grpc."
"""Health and reflection."""


class TracingInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or handler.request_streaming or method.startswith(_UNTRACED):
            return handler
        said = next(
            (str(v) for k, v in handler_call_details.invocation_metadata if k == "traceparent"),
            None,
        )
        if said is None:
            return handler  # nobody asked for it: whoever looks every few seconds begins no traces
        return self._traced(handler, method.removeprefix("/"), said)

    def _traced(self, handler: Any, method: str, said: str) -> Any:
        kept = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if not handler.response_streaming:

            async def answer(request: Any, context: Any) -> Any:
                with self._called(method, said, context):
                    return await handler.unary_unary(request, context)

            return grpc.unary_unary_rpc_method_handler(answer, **kept)
        stream = handler.unary_stream
        if inspect.isasyncgenfunction(stream):

            async def generate(request: Any, context: Any) -> Any:
                with self._called(method, said, context):
                    async for message in stream(request, context):
                        yield message

            return grpc.unary_stream_rpc_method_handler(generate, **kept)

        async def write(request: Any, context: Any) -> None:
            with self._called(method, said, context):
                await stream(request, context)

        return grpc.unary_stream_rpc_method_handler(write, **kept)

    @contextmanager
    def _called(self, method: str, said: str, context: Any) -> Iterator[Span]:
        service, _, name = method.partition("/")
        about = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        span = self._tracing.begin(method, SpanKind.SERVER, about, Sent(said))
        try:
            with self._tracing.current(span):
                yield span
        except BaseException as error:
            span.note({"chadburn.ended_by": type(error).__name__})
            raise
        finally:
            code = context.code()
            if code not in _OK:
                span.fail(getattr(code, "name", str(code)))
            span.end()


def traced_by(tracing: Tracing) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """None where nobody traces: then no call goes another way than without."""
    return () if tracing is NO_TRACING else (TracingInterceptor(tracing),)
