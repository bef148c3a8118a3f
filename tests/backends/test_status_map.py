"""What is made of a gRPC status."""

from __future__ import annotations

import grpc
from grpc.aio import AioRpcError, Metadata

from app.backends.status_map import for_the_log


def test_an_engines_text_stays_one_line_of_the_log() -> None:
    """Else an engine could write lines of its own there, or move a terminal's cursor."""
    text = "gone\n2026-11-02 [info] request status=200\r\x1b[2J" + "x" * 1_000
    error = AioRpcError(grpc.StatusCode.INTERNAL, Metadata(), Metadata(), details=text)
    said = for_the_log(error)
    assert said.startswith("INTERNAL: gone 2026-11-02 [info] request status=200  [2Jxxx")
    assert said.isprintable()
    assert len(said) < 400
