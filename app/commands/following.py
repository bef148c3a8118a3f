"""Following an operation to its end over its event stream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import httpx2

from app.commands.ending import CommandFailed, Exit
from app.commands.http import Gateway, Json
from app.domain.events import ControlEvent

# How long the stream may be out of reach in one piece before the command gives up.
PATIENCE_S = 60.0
# Above the gateway's ping interval: a connection that says nothing for longer is a dead one.
QUIET_S = 45.0
PAUSE_S = 0.3
_CONTROL = frozenset(ControlEvent)


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One server-sent event; `id` None: it has no place in the ledger."""

    id: str | None
    type: str
    data: Any


def parse(lines: Iterator[str]) -> Iterator[StreamEvent]:
    """Server-sent events as the WHATWG text defines them, as far as JSON data needs it."""
    kind, place, data = "message", None, list[str]()
    for line in lines:
        if not line:
            if data:
                yield StreamEvent(place, kind, json.loads("\n".join(data)))
            kind, data = "message", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "data":
            data.append(value)
        elif name == "id":
            place = value


def follow(
    gateway: Gateway, operation_id: str, *, timeout_s: float, tell: Callable[[StreamEvent], None]
) -> Json:
    """The operation as it stands after its terminal event; `tell` is given each event once.

    Raises CommandFailed with code UNKNOWN when `timeout_s` passes first: it goes on by itself.
    """
    path = f"/v1/operations/{operation_id}"
    ends_at = time.monotonic() + timeout_s
    heard_at = time.monotonic()
    last: str | None = None
    while (left_s := ends_at - time.monotonic()) > 0:
        try:
            with gateway.stream(f"{path}/events", last, min(QUIET_S, left_s)) as response:
                heard_at = time.monotonic()
                lines = takewhile(lambda _: time.monotonic() < ends_at, response.iter_lines())
                for event in parse(lines):
                    last = event.id or last
                    if event.type not in _CONTROL:
                        tell(event)
            operation = gateway.get(path)
            if operation["done"]:
                return operation
        except httpx2.TransportError as error:
            _keep_patience(heard_at, str(error) or type(error).__name__)
        except CommandFailed as failed:
            # It restarts, or has no room for one more stream: both pass.
            if failed.exit is not Exit.UNREACHABLE:
                raise
            _keep_patience(heard_at, failed.line)
        time.sleep(PAUSE_S)
    operation = gateway.get(path)
    if operation["done"]:
        return operation
    raise CommandFailed(Exit.UNKNOWN, f"it is still {operation['state']} after {timeout_s:g} s")


def _keep_patience(heard_at: float, why: str) -> None:
    if time.monotonic() - heard_at > PATIENCE_S:
        raise CommandFailed(Exit.UNREACHABLE, why)
