"""The engine is left as it was found, or the report says how it is not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.conformance.case import Case, Lack, NotApplicable, NotHeld, NotPromised, Verdict, expect
from app.conformance.catalogue import catalogue, chosen
from app.conformance.hook import HookFailed
from app.conformance.suite import run_suite
from app.conformance.traffic import TooShort
from app.conformance.trial import TargetRefused, Trial
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.conformance.faulty import Fault, turned_down
from tests.conformance.judging import ids_of, judged, options_for, paced_engine
from tests.conformance.paced_engine import PacedEngine
from tests.enginekit.client import client_of, until

pytestmark = pytest.mark.anyio


def case(run: Any) -> Case:
    return Case(id=f"test.{run.__name__}", sentence="It is promised.", needs=(), run=run)


async def pauses_and_fails(trial: Trial) -> None:
    await trial.client.completed(trial.pause())
    raise NotHeld("something", "something else")


async def pauses_and_waits(trial: Trial) -> None:
    await trial.client.completed(trial.pause())
    await asyncio.Event().wait()


async def drains_and_waits(trial: Trial) -> None:
    async with trial.draining():
        await asyncio.Event().wait()


async def test_a_failed_case_leaves_no_pause(tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double, client_of(double) as client:
        report = await run_suite([case(pauses_and_fails)], options_for(double))
        assert ids_of(report, Verdict.FAIL) == {"test.pauses_and_fails"}
        assert report.left_behind is None
        assert await client.admission() == "open"


@pytest.mark.parametrize(
    ("run", "reached"), [(pauses_and_waits, "paused"), (drains_and_waits, "draining")]
)
async def test_a_cancelled_run_leaves_neither_pause_nor_operation(
    run: Any, reached: str, tmp_path: Path
) -> None:
    async with paced_engine(tmp_path) as double, client_of(double) as client:
        suite = asyncio.create_task(run_suite([case(run)], options_for(double)))

        async def there() -> bool:
            return await client.admission() == reached

        await until(there)
        suite.cancel()
        with pytest.raises(asyncio.CancelledError):
            await suite
        state = (await client.profile()).state
        assert state.admission == pb.ADMISSION_STATE_OPEN
        assert not state.open_operations


async def test_an_engine_that_is_paused_is_not_touched(tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double, client_of(double) as client:
        await client.completed(client.pause())
        before = await client.profile()
        with pytest.raises(TargetRefused, match="lifts no pause but its own"):
            await judged(options_for(double))
        assert await client.profile() == before


async def test_a_busy_engine_is_not_touched(tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double, client_of(double) as client:
        generation = client.generate("one two", stopping={"max_tokens": 2_000})
        await generation.first()
        await client.begin(client.pause("drain"))
        with pytest.raises(TargetRefused):
            await judged(options_for(double))
        generation.hang_up()


async def test_somebody_elses_pause_stays(tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double, client_of(double) as client:

        async def interrupted(_trial: Trial) -> None:
            await client.completed(client.pause("keep"))

        cases = [case(interrupted), *chosen(catalogue(), ["profile.*"])]
        report = await run_suite(cases, options_for(double))
        assert await client.admission() == "paused"
    assert ids_of(report, Verdict.FAIL) == {"test.interrupted"}
    assert report.left_behind is not None
    assert "somebody else" in report.left_behind
    untried = report.of(Verdict.NOT_APPLICABLE)
    assert len(untried) == len(cases) - 1
    assert all("did not recover from test.interrupted" in finding.reason for finding in untried)
    assert not report.passed


class NeverResumes(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "Resume":
            request.idempotency_key = ""
        return request


async def test_an_engine_that_cannot_be_brought_back_is_said_to_be_so(tmp_path: Path) -> None:
    fault = NeverResumes()
    async with paced_engine(tmp_path, interceptors=[fault]) as double:
        fault.double = double
        report = await judged(options_for(double, hook=None), "pause.each-mode", "health.*")
    assert ids_of(report, Verdict.FAIL) == {"pause.each-mode"}
    assert report.left_behind is not None


class NotThere(Fault):
    async def instead(self, method: str, request: Any) -> list[Any] | None:
        return None

    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        await turned_down(context, grpc.StatusCode.UNIMPLEMENTED)

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            answer.state.admission = 77
        return answer


async def test_an_answer_that_is_none_of_the_schema_is_no_pass(tmp_path: Path) -> None:
    fault = NotThere()
    async with paced_engine(tmp_path, interceptors=[fault]) as double:
        fault.double = double
        with pytest.raises(TargetRefused, match="77"):
            await judged(options_for(double))


async def fails_otherwise(_trial: Trial) -> None:
    raise ZeroDivisionError("of the suite's own")


async def is_not_promised(_trial: Trial) -> None:
    raise NotPromised("it is not offered")


async def is_not_reached(_trial: Trial) -> None:
    raise NotApplicable("it ended too soon")


async def times_out(_trial: Trial) -> None:
    raise TimeoutError


async def holds(_trial: Trial) -> None:
    return


async def test_a_verdict_is_what_a_case_ends_with(tmp_path: Path) -> None:
    """Nothing that goes wrong in the suite itself is ever a pass."""
    runs = (fails_otherwise, is_not_promised, is_not_reached, times_out, holds)
    async with paced_engine(tmp_path) as double:
        report = await run_suite([case(run) for run in runs], options_for(double))
    assert [(one.verdict, one.lack) for one in report.findings] == [
        (Verdict.FAIL, None),
        (Verdict.NOT_APPLICABLE, Lack.NOT_PROMISED),
        (Verdict.NOT_APPLICABLE, Lack.NOT_REACHED),
        (Verdict.FAIL, None),
        (Verdict.PASS, None),
    ]


async def meets_a_request(trial: Trial) -> None:
    """One that is already over, unless it was asked to be long."""
    async with trial.traffic.running(0.2) as running:
        await asyncio.sleep(0.5)
        if running.end is not None:
            raise TooShort
        expect(running.end is None, "it to go on", running)


async def test_a_request_that_was_over_too_soon_is_tried_once_more_and_longer(
    tmp_path: Path,
) -> None:
    async with paced_engine(tmp_path) as double:
        report = await run_suite([case(meets_a_request)], options_for(double))
    assert report.findings[0].verdict is Verdict.PASS


async def is_always_over(trial: Trial) -> None:
    async with trial.traffic.running(0.1) as running:
        await running.over(20.0, "by itself")
        raise TooShort


async def test_a_request_that_is_over_too_soon_again_proves_nothing(tmp_path: Path) -> None:
    async with paced_engine(tmp_path) as double:
        report = await run_suite([case(is_always_over)], options_for(double))
    assert report.findings[0].lack is Lack.NOT_REACHED


async def stops_a_rank(trial: Trial) -> None:
    await trial.fault("stop-rank", "0")


async def kills_a_rank(trial: Trial) -> None:
    await trial.fault("kill-rank", "0")


class DeclinesAll:
    async def run(self, *words: str) -> None:
        if words[0] != "restart":
            raise HookFailed(f"ended with code 1 at {' '.join(words)}", declined=True)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_the_only_rank_need_not_be_stopped(ranks: int, tmp_path: Path) -> None:
    async with paced_engine(tmp_path, make_engine=lambda: PacedEngine(world_size=ranks)) as double:
        options = options_for(double, hook=DeclinesAll())
        report = await run_suite([case(stops_a_rank), case(kills_a_rank)], options)
    stopped, killed = report.findings
    assert killed.verdict is Verdict.FAIL
    if ranks == 1:
        assert stopped.lack is Lack.NOT_REACHED
        assert "does not stop it" in stopped.reason
    else:
        assert stopped.verdict is Verdict.FAIL
