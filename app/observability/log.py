"""Structured logs: one JSON object a line, with the request they belong to.

What goes in is chosen, never dumped: no bodies, no headers, no query strings, and of an exception
its type and where it was raised, because messages of foreign libraries quote what they were given.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

from app.domain.errors import ChadburnError
from app.observability.tracing import what_it_came_of

_FRAMES = 12
_QUIET = (
    *("uvicorn.access", "uvicorn.error", "sse_starlette.sse", "aiosqlite", "sqlalchemy"),
    *("alembic", "asyncio", "httpcore2", "httpx2"),
)

Event = MutableMapping[str, Any]


def logger(name: str) -> Any:
    """A structlog logger; `log.info("event_name", key=value)`."""
    return structlog.stdlib.get_logger(name)


def configure_logging(
    level: str, style: Literal["json", "console"], stream: TextIO | None = None
) -> None:
    """Send every log of the process through one formatter. `stream` None: standard error."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _with_ids,
        _with_safe_exception,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    renderers: list[Any] = (
        [structlog.processors.JSONRenderer(sort_keys=True)]
        if style == "json"
        else [_with_exception_as_text, structlog.dev.ConsoleRenderer(colors=False)]
    )
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(allow=[]), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        foreign = logging.getLogger(name)
        foreign.handlers.clear()
        foreign.propagate = True
    for name in _QUIET:
        # Their records quote addresses, parameters and chunks of streams.
        logging.getLogger(name).setLevel(logging.WARNING)


class _Handler(logging.StreamHandler[TextIO]):
    """Python's own would answer a record that it cannot write with a whole traceback, and with the
    messages in it that are kept out of the records."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - its name there
        kind = sys.exc_info()[0]
        with contextlib.suppress(OSError, ValueError):  # the stream itself may be what is gone
            self.stream.write(
                f"a log record of {record.name} could not be written:"
                f" {kind.__qualname__ if kind else 'no reason'}\n"
            )


def exception_facts(error: BaseException) -> dict[str, Any]:
    """What may be told of an exception: its type, its own reason, and where it came from."""
    facts: dict[str, Any] = {
        "type": type(error).__qualname__,
        "raised_at": [
            f"{_tail(frame.filename)}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)[-_FRAMES:]
        ],
    }
    if isinstance(error, ChadburnError):
        facts["reason"] = error.reason
    if isinstance(error, OSError):
        facts["errno"] = error.errno
    cause = error.__cause__ or error.__context__
    if cause is not None:
        facts["cause"] = type(cause).__qualname__
    return facts


def _tail(filename: str) -> str:
    return "/".join(filename.split("/")[-3:])


def _with_ids(_logger: Any, _method: str, event: Event) -> Event:
    for name, value in what_it_came_of().items():
        event.setdefault(name, value)
    return event


def _with_exception_as_text(_logger: Any, _method: str, event: Event) -> Event:
    """For a renderer that takes an exception to be text: one line for each frame."""
    facts = event.get("exception")
    if isinstance(facts, dict):
        said = [f"{name}: {value}" for name, value in facts.items() if name != "raised_at"]
        event["exception"] = "\n".join([", ".join(said), *(f"  {at}" for at in facts["raised_at"])])
    return event


def _with_safe_exception(_logger: Any, _method: str, event: Event) -> Event:
    given = event.pop("exc_info", None)
    if given is True:
        given = sys.exc_info()
    if isinstance(given, tuple):
        given = given[1]
    if isinstance(given, BaseException):
        event["exception"] = exception_facts(given)
    record = event.get("_record")
    if isinstance(record, logging.LogRecord):
        # The formatter of the standard library would append the traceback by itself.
        record.exc_info = record.exc_text = None
    return event
