"""Stubs of the generated code, one for each channel: making one builds a call for every method of
its service, which costs as much as the call that it is then used for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import grpc

Stub = TypeVar("Stub")
_NAME = "_chadburn_stubs"


def stub_of(kind: Callable[[grpc.aio.Channel], Stub], channel: grpc.aio.Channel) -> Stub:
    """`kind`: the generated class. Kept with the channel, which its calls keep alive: by anything
    that outlives it, it would never go."""
    stubs: dict[Any, Any] = channel.__dict__.setdefault(_NAME, {})
    stub: Stub | None = stubs.get(kind)
    if stub is None:
        stub = stubs[kind] = kind(channel)
    return stub
