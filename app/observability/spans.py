"""Spans of a trace, as the rest of the program makes them. Nothing here sends anything: where
traces are wanted `app.observability.otlp` does, and is imported by nobody but who was told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

Value = str | int | float | bool
Attributes = Mapping[str, Value]


class SpanKind(Enum):
    """What it is to the process: asked of it, asked by it, or its own affair."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Sent:
    """The parent is who sent this `traceparent`; None: nobody said, it begins a trace."""

    traceparent: str | None


@dataclass(frozen=True, slots=True)
class OfOperation:
    """The parent is the span under which the operation was taken on, here or by another process,
    now or before a restart: its number is made of the operation's id (`own`), so that the ledger
    has to keep the trace alone. `sampled` None: the process that knows is another one.
    """

    operation_id: str
    trace_id: str | None
    sampled: bool | None = None


Parent = Sent | OfOperation | None
"""None: what is current here."""


class Span(Protocol):
    @property
    def trace_id(self) -> str | None:
        """None: there are no traces."""

    @property
    def traceparent(self) -> str | None:
        """To be sent on, so that what follows there is below this."""

    @property
    def sampled(self) -> bool | None: ...

    def note(self, attributes: Attributes) -> None: ...

    def event(self, name: str, attributes: Attributes) -> None: ...

    def fail(self, why: str) -> None:
        """`why`: a reason or code; never a message, which may quote what somebody sent."""

    def named(self, name: str) -> None:
        """It turns out to be another than it was begun as."""

    def end(self) -> None: ...


class Tracing(Protocol):
    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes | None = None,
        parent: Parent = None,
        own: str | None = None,
    ) -> Span:
        """Not yet current. `own`: the operation whose taking on this is."""

    def current(self, span: Span) -> AbstractContextManager[None]:
        """What begins meanwhile, in this task and those it starts, is below it."""

    def here(self) -> bool:
        """Whether anything is current: what is not asked for by somebody begins no traces."""


@contextmanager
def spanned(
    tracing: Tracing,
    name: str,
    attributes: Attributes | None = None,
    *,
    parent: Parent = None,
    own: str | None = None,
) -> Iterator[Span]:
    """A span of the process's own around a block. An exception is told by its type alone."""
    span = tracing.begin(name, SpanKind.INTERNAL, attributes, parent, own)
    try:
        with tracing.current(span):
            yield span
    except asyncio.CancelledError:
        # Let go of, as when the process ends: no fault, and somebody may go on with it.
        span.note({"chadburn.let_go": True})
        raise
    except BaseException as error:
        span.fail(str(getattr(error, "reason", type(error).__name__)))
        raise
    finally:
        span.end()


class _NoSpan:
    trace_id = None
    traceparent = None
    sampled = None

    def note(self, attributes: Attributes) -> None:
        pass

    def event(self, name: str, attributes: Attributes) -> None:
        pass

    def fail(self, why: str) -> None:
        pass

    def named(self, name: str) -> None:
        pass

    def end(self) -> None:
        pass


class _NoTracing:
    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes | None = None,
        parent: Parent = None,
        own: str | None = None,
    ) -> Span:
        del name, kind, attributes, parent, own
        return NO_SPAN

    @contextmanager
    def current(self, span: Span) -> Iterator[None]:
        del span
        yield

    def here(self) -> bool:
        return False


NO_SPAN: Span = _NoSpan()
NO_TRACING: Tracing = _NoTracing()
