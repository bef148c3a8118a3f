"""What a connection may take before a request can be judged, and what it may hold after."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from app.http.connection import MAX_HEAD_BYTES, MAX_HEADERS
from tests.http.gateway import Gateway, gateway
from tests.http.test_problems import MEMBERS

pytestmark = pytest.mark.anyio

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


async def said_to(gate: Gateway, sent: bytes = b"", *, first: bytes = b"") -> bytes:
    """All that the gateway answers to these bytes until it hangs up; to `sent` alone, which goes
    out once `first`, whose answer is one JSON object, was answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
    try:
        async with asyncio.timeout(60):
            if first:
                writer.write(first)
                assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
            writer.write(sent)
            await writer.drain()
            return await reader.read()
    finally:
        writer.close()


def problem_in(answer: bytes) -> dict[str, Any]:
    """The problem in the answer, which has all that any other answer has."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().removeprefix("HTTP/1.1 ").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    found: dict[str, Any] = json.loads(body)
    assert set(found) == MEMBERS
    assert lines[0].startswith(f"{found['status']} ")
    assert headers["content-type"] == "application/problem+json"
    assert headers["content-length"] == str(len(body))
    assert headers["connection"] == "close"
    assert headers["x-request-id"] == found["request_id"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    return found


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 canary",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CANARY / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        GET + b"X-Canary: a\x01b\r\n\r\n",
        GET + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        GET + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
    ],
)
async def test_what_is_no_request_gets_a_problem_too(gate: Gateway, sent: bytes) -> None:
    found = problem_in(await said_to(gate, sent))
    assert (found["status"], found["reason"]) == (400, "MALFORMED_REQUEST")
    assert "canary" not in json.dumps(found).lower()


async def test_a_head_over_the_limit_is_refused(gate: Gateway) -> None:
    """Of many headers or of one that goes on and on, and also as a later request."""
    many = b"".join(b"X-%d: %s\r\n" % (n, b"a" * 1000) for n in range(100))
    for first in (b"", GET + b"\r\n"):
        for sent in (GET + many, GET + b"X: " + b"a" * 100_000, b"GET /" + b"a" * 100_000):
            # No more than is over the limit: what nobody reads would cost us the answer.
            found = problem_in(await said_to(gate, sent[: MAX_HEAD_BYTES + 1], first=first))
            assert (found["status"], found["reason"]) == (431, "HEAD_TOO_LARGE")


async def test_headers_are_counted(gate: Gateway) -> None:
    """Also those behind a body, which are added to nothing."""
    for first in (b"", GET + b"\r\n"):
        found = problem_in(await said_to(gate, GET + b"A: b\r\n" * (MAX_HEADERS + 1), first=first))
        assert (found["status"], found["reason"]) == (431, "HEAD_TOO_LARGE")
    fitting = b"A: b\r\n" * (MAX_HEADERS - 2) + b"Connection: close\r\n\r\n"
    assert (await said_to(gate, GET + fitting)).startswith(b"HTTP/1.1 200 ")

    head = b"POST /v1/engines/e1/pause HTTP/1.1\r\nHost: localhost\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    answer = await said_to(gate, chunked + b"Authorization: Bearer x\r\n" * (MAX_HEADERS + 1))
    assert b"TOKEN_MISSING" in answer or b"HEAD_TOO_LARGE" in answer


@pytest.mark.parametrize(
    "begun",
    [b"1\r\n{\r\n0\r\nX: ", b"1;", b"1\r\n{\r\n0\r\n"],
    ids=["a trailer", "a chunk's extension", "trailers"],
)
async def test_what_a_body_is_wrapped_in_has_an_end(gate: Gateway, begun: bytes) -> None:
    head = b"POST /v1/engines/e1/pause HTTP/1.1\r\nHost: localhost\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", gate.port)
    writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n" + begun)
    piece = b"X: y\r\n" * 1_000 if begun.endswith(b"\n") else b"a" * 100_000
    with pytest.raises(ConnectionError):
        await _pour(writer, piece, 1_000)
    writer.close()


async def test_a_head_without_end_is_not_kept(gate: Gateway) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", gate.port)
    writer.write(GET)
    with pytest.raises(ConnectionError):
        await _pour(writer, b"X: " + b"a" * 100_000 + b"\r\n", 1_000)
    writer.close()


async def _pour(writer: asyncio.StreamWriter, piece: bytes, times: int) -> None:
    for _ in range(times):
        writer.write(piece)
        await writer.drain()


async def test_a_large_head_within_the_limit_is_read(gate: Gateway) -> None:
    answer = await gate.http.get("/healthz", headers={"X-Large": "a" * 40_000})
    assert answer.status_code == 200


@pytest.fixture
async def hasty(tmp_path: Path) -> Any:
    async with gateway(
        tmp_path / "hasty", receive_timeout_s=0.5, max_concurrent_requests=4
    ) as made:
        yield made


async def test_a_head_that_does_not_come_is_not_waited_for(hasty: Gateway) -> None:
    assert problem_in(await said_to(hasty, GET))["reason"] == "REQUEST_TOO_SLOW"
    assert await said_to(hasty) == b""
    assert problem_in(await said_to(hasty, GET, first=GET + b"\r\n"))["status"] == 408


async def test_bodies_that_trickle_do_not_hold_the_places_of_others(hasty: Gateway) -> None:
    head = (
        "POST /v1/engines/e1/pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n"
        f"Content-Type: application/json\r\nAuthorization: {hasty.auth()['Authorization']}\r\n"
        "Idempotency-Key: slow\r\nConnection: close\r\n\r\n{"
    ).encode()
    slow = [asyncio.ensure_future(said_to(hasty, head)) for _ in range(4)]
    for answer in await asyncio.gather(*slow):
        found = problem_in(answer)
        assert (found["status"], found["reason"]) == (408, "REQUEST_TOO_SLOW")
        assert found["retryable"] is True
    assert (await hasty.get("/v1/engines/e1")).status_code == 200


async def test_a_request_that_is_whole_has_all_the_time_it_needs(hasty: Gateway) -> None:
    hasty.engine.go.clear()
    waiting = await hasty.order("pause", {"mode": "drain"}, {"Prefer": "wait=2"})
    assert waiting.status_code == 202
    hasty.engine.go.set()


async def test_there_is_always_room_for_one_more(tmp_path: Path) -> None:
    """Beyond the limit the connection goes that has been without a request for longest."""
    async with gateway(tmp_path / "data", registered=False, max_connections=16) as gate:
        silent = [await asyncio.open_connection("127.0.0.1", gate.port) for _ in range(16)]
        try:
            assert (await gate.http.get("/healthz")).status_code == 200
            async with asyncio.timeout(30):
                assert await silent[0][0].read() == b""
            assert not silent[1][0].at_eof()
            assert (await gate.http.get("/v1/engines", headers=gate.auth())).status_code == 200
        finally:
            for _, writer in silent:
                writer.close()


async def test_a_client_that_takes_nothing_is_not_kept(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", stream_send_timeout_s=0.5) as gate:
        await gate.http.aclose()
        held = gate.server.server_state.connections
        while held:  # noqa: ASYNC110 - the end of connections has no event here
            await asyncio.sleep(0.02)
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.port, limit=1024)
        # More than buffers of the system hold.
        writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        await writer.drain()
        async with asyncio.timeout(30):
            await reader.readexactly(10)
            while held:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        writer.close()
