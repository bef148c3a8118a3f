"""The command always ends, and says why: whatever is at the address, and whatever happens to it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.conformance.case import Lack, Verdict
from app.conformance.catalogue import catalogue, chosen
from app.conformance.report import Finding
from app.conformance.suite import run_suite
from app.conformance.trial import TargetRefused
from app.enginekit.settings import TlsFiles
from tests.backends.certificates import Authority
from tests.conformance.judging import failures, judged, options_for, paced_engine
from tests.conformance.paced_engine import InProcessHook
from tests.conformance.test_command import addresses, begin, chadburn, end
from tests.enginekit.client import client_of

pytestmark = pytest.mark.anyio

SOON = "2"  # seconds of patience
BOUND_S = 120.0


class AtRpc(grpc.aio.ServerInterceptor):
    """Something happens at the nth RPC to the engine, and at each later one if it `stays`."""

    def __init__(self, number: int, what: Callable[[], Awaitable[None]], *, stays: bool) -> None:
        self._number = number
        self._what = what
        self._stays = stays
        self._seen = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        self._seen += 1
        if self._seen == self._number or (self._stays and self._seen > self._number):
            await self._what()
        return await continuation(handler_call_details)


# ---- what is at the address ----


async def talk(answer: bytes | None, reader: Any, writer: Any) -> None:
    """None: it listens and says nothing."""
    try:
        await reader.read(64)
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def stranger(answer: bytes | None) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(answer, reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b"", None],
    ids=["http", "ssh", "hangs-up", "silent"],
)
async def test_what_speaks_no_grpc_gives_7(answer: bytes | None) -> None:
    async with stranger(answer) as address:
        done = await chadburn(address, "--patience", SOON, "--wait", "0")
    assert done.code == 7, done.err
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err


@pytest.mark.parametrize("address", ["no-such-host.invalid:1", "unix:/nowhere/at/all", "nonsense"])
async def test_an_address_that_leads_nowhere_gives_7(address: str) -> None:
    done = await chadburn(address, "--patience", SOON, "--wait", "0")
    assert done.code == 7, done.err
    assert done.err.count("\n") == 1


async def test_an_inference_address_that_leads_nowhere_gives_7(tmp_path: Path) -> None:
    async with stranger(b"") as nobody, paced_engine(tmp_path) as double:
        done = await chadburn(
            *(double.admin_address, "--inference", nobody, "--case", "retry.*"),
            *("--patience", SOON, "--wait", "0"),
        )
    assert done.code == 7, done.err
    assert "--inference" in done.err


async def test_the_other_listener_gives_6_and_says_what_it_may_be(tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double:
        done = await chadburn(double.inference_address, "--patience", SOON, "--wait", "0")
    assert done.code == 6
    assert "is this the admin listener?" in done.err


async def test_tls_where_it_is_wanted_and_where_it_is_not(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("engine.test")
    ca = str(authority.path)
    tls = TlsFiles(certificate=certificate, key=key)
    async with paced_engine(tmp_path / "engine", admin_tls=tls) as double:
        words = (double.admin_address, "--patience", SOON, "--case", "retry.*")
        plain = await chadburn(*words)
        trusted = await chadburn(*words, "--tls-ca", ca, "--tls-name", "engine.test")
        stranger_ = await chadburn(*words, "--tls-ca", ca, "--tls-name", "other.test")
    assert (plain.code, trusted.code, stranger_.code) == (7, 0, 7), trusted.err


# ---- what happens to an engine ----


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 13, 21, 34, 55])
async def test_an_engine_that_stops_answering_at_any_moment(number: int, tmp_path: Path) -> None:
    """From the nth RPC on nothing is answered any more."""
    silent = AtRpc(number, asyncio.Event().wait, stays=True)  # type: ignore[arg-type]
    async with paced_engine(tmp_path, interceptors=[silent]) as double:
        options = options_for(double, hook=None, patience_s=0.4)
        async with asyncio.timeout(BOUND_S):
            try:
                report = await judged(options, "profile.*", "retry.*", "pause.*")
            except TargetRefused:
                assert number <= 3
                return
    assert not report.passed
    assert report.left_behind is not None
    assert len(report.of(Verdict.FAIL)) == 1
    untried = report.lacking(Lack.NOT_TRIED)
    assert report.findings[-len(untried) :] == untried


@pytest.mark.parametrize("number", [4, 9, 20, 40])
async def test_an_engine_that_dies_at_any_moment(number: int, tmp_path: Path) -> None:
    deaths: list[asyncio.Task[None]] = []

    async def die() -> None:
        deaths.append(asyncio.create_task(double.kill()))
        await asyncio.sleep(30)

    dying = AtRpc(number, die, stays=False)
    async with paced_engine(tmp_path, interceptors=[dying]) as double:
        options = options_for(double, hook=None, patience_s=1.0)
        async with asyncio.timeout(BOUND_S):
            report = await judged(options, "profile.*", "retry.*", "pause.*")
        await asyncio.gather(*deaths)
    assert not report.passed
    assert report.left_behind is not None
    assert report.lacking(Lack.NOT_TRIED)


async def test_an_engine_that_dies_is_started_again_where_there_is_a_hook(tmp_path: Path) -> None:
    deaths: list[asyncio.Task[None]] = []

    async def die() -> None:
        deaths.append(asyncio.create_task(double.kill()))
        await asyncio.sleep(30)

    class Mourning(InProcessHook):
        async def run(self, *words: str) -> None:
            await asyncio.gather(*deaths)
            await super().run(*words)

    dying = AtRpc(20, die, stays=False)
    async with paced_engine(tmp_path, interceptors=[dying]) as double:
        options = options_for(double, hook=Mourning(double), patience_s=5.0)
        report = await judged(options, "profile.*", "retry.*")
    assert len(report.of(Verdict.FAIL)) == 1, failures(report)
    assert report.left_behind is None
    assert not report.lacking(Lack.NOT_TRIED)


async def test_the_time_limit_ends_a_run_that_would_go_on(tmp_path: Path) -> None:
    calls = 0

    async def count() -> None:
        nonlocal calls
        calls += 1

    at_untried: set[int] = set()

    def told(finding: Finding) -> None:
        if finding.lack is Lack.NOT_TRIED:
            at_untried.add(calls)

    counting = AtRpc(1, count, stays=True)
    async with (
        paced_engine(tmp_path, interceptors=[counting]) as double,
        client_of(double) as client,
    ):
        double.delays_s["Resume"] = 0.5
        options = options_for(double, time_limit_s=1.2)
        cases = chosen(catalogue(), ["pause.*", "health.*"])
        report = await run_suite(cases, options, told=told)
        double.delays_s.clear()
        assert await client.admission() == "open"
    assert not report.passed
    assert report.left_behind is None
    assert report.lacking(Lack.NOT_TRIED)
    assert "time limit" in report.lacking(Lack.NOT_TRIED)[0].reason
    assert len(report.lacking(Lack.NOT_TRIED)) > 1
    assert len(at_untried) == 1, "a case that is not tried asks the engine nothing"


async def test_whoever_wants_everything_proven_says_strict(tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double:
        words = (*addresses(double), "--case", "retry.*", "--case", "restart.serves")
        lenient, strict = await chadburn(*words), await chadburn(*words, "--strict")
    assert (lenient.code, strict.code) == (0, 3)


# ---- interrupts ----


async def test_an_interrupt_while_the_engine_hangs_still_ends(tmp_path: Path) -> None:
    """Once for the way back, and once more for whoever does not want to wait for that either."""
    hangs: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def hang() -> None:
        if not hangs.done():
            hangs.set_result(None)
        await asyncio.Event().wait()

    async with paced_engine(tmp_path, interceptors=[AtRpc(12, hang, stays=True)]) as double:
        junit = tmp_path / "partial.xml"
        process = await begin(*addresses(double), "--patience", "300", "--junit", str(junit))
        await asyncio.wait_for(hangs, BOUND_S)
        process.send_signal(signal.SIGINT)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.wait(), 1.0)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(BOUND_S):
            done = await end(process)
    assert done.code == 130, done.err
    assert "Traceback" not in done.err
    assert "interrupted after" in done.err
    assert junit.exists()
