"""Where a vLLM engine tells of its KV cache. The events themselves are had from there alone."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from app.rpc.openengine.v1 import kv_pb2
from app.sidecars.answers import Answer, Unreadable

_SCHEMA_VERSION = 1


def sources_of(answer: Answer, server: str, wanted: frozenset[int]) -> list[kv_pb2.KvEventSource]:
    """GET /kv_event_sources: a publisher for each data-parallel engine that has one. It names what
    it is bound to; `server` is the URL under which the engine's machine is known here. `wanted`
    empty: all. Raises Unreadable."""
    found = answer.json()
    if not isinstance(found, dict):
        raise Unreadable("the engine's event sources cannot be read")
    sources = []
    for number, config in sorted(found.items()):
        rank = int(number) if str(number).isdecimal() else 0
        told = isinstance(config, dict) and config.get("publisher") == "zmq"
        if told and (not wanted or rank in wanted):
            sources.append(_source(rank, config, urlsplit(server).hostname or ""))
    return sources


def _source(rank: int, config: dict[str, Any], host: str) -> kv_pb2.KvEventSource:
    bound = urlsplit(str(config.get("endpoint") or ""))
    source = kv_pb2.KvEventSource(
        transport="zmq",
        topic=str(config.get("topic") or ""),
        data_parallel_rank=rank,
        encoding="msgpack",
        schema_version=_SCHEMA_VERSION,
    )
    anywhere = bound.netloc.rpartition(":")[0] in ("*", "0.0.0.0", "[::]")  # noqa: S104
    source.endpoint_addr.host = host if anywhere else (bound.hostname or "")
    port = bound.netloc.rpartition(":")[2]
    source.endpoint_addr.port = int(port) if port.isdecimal() else 0
    source.endpoint_addr.protocol = bound.scheme
    if isinstance(config.get("replay_endpoint"), str):
        source.replay_endpoint = config["replay_endpoint"]
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        value = config.get(name)
        if isinstance(value, int) and value >= 0:
            setattr(source, name, value)
    return source
