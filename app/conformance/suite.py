"""All cases one after the other, each left with the engine as it was before."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc

from app.conformance.case import Case, Lack, Need, NotApplicable, NotHeld, Verdict
from app.conformance.client import brief
from app.conformance.orders import Kind, name_of
from app.conformance.report import Finding, Report
from app.conformance.traffic import TooShort
from app.conformance.trial import Options, Trial, opened
from app.conformance.way_back import SomebodyElse, Unsettled
from app.rpc.openengine.v1 import admin_pb2 as pb


def _run_id() -> str:
    return uuid.uuid4().hex[:8]


async def run_suite(
    cases: Sequence[Case],
    options: Options,
    *,
    told: Callable[[Finding], None] = lambda _: None,
    new_id: Callable[[], str] = _run_id,
) -> Report:
    """`told` hears each finding as soon as it is there.

    Raises TargetRefused when the suite cannot begin. Cancelling it leaves the engine as it was
    found, as far as the engine lets that be done.
    """
    findings: list[Finding] = []

    def note(finding: Finding) -> None:
        findings.append(finding)
        told(finding)

    left = None
    engine: dict[str, object] = {}
    limit = None
    if options.time_limit_s is not None:
        limit = asyncio.get_running_loop().time() + options.time_limit_s
    try:
        async with AsyncExitStack() as stack:
            trial = await stack.enter_async_context(opened(options, new_id))
            engine = _engine(trial)
            for index, case in enumerate(cases):
                finding = await _judge(case, trial, limit)
                if finding.lack is Lack.NOT_TRIED:
                    # Out of time, and nothing was touched: no way back, whose questions would
                    # take as long again on a machine that is slow.
                    note(finding)
                    continue
                try:
                    await trial.settle()
                except (Unsettled, grpc.aio.AioRpcError) as unsettled:
                    if finding.verdict is not Verdict.FAIL:
                        finding = _left(case, unsettled)
                    if not await _mended(trial, unsettled):
                        note(finding)
                        for rest in cases[index + 1 :]:
                            note(_not_tried(rest, case))
                        break
                note(finding)
    except Unsettled as unsettled:
        left = str(unsettled)
    return Report(
        target=options.admin.address, engine=engine, findings=tuple(findings), left_behind=left
    )


async def _judge(case: Case, trial: Trial, limit: float | None) -> Finding:
    """`limit`: on the event loop's clock."""
    began = time.monotonic()
    if limit is not None and asyncio.get_running_loop().time() > limit:
        return _untried(case, _OUT_OF_TIME)

    def finding(verdict: Verdict, **said: Any) -> Finding:
        return Finding(case=case, verdict=verdict, seconds=time.monotonic() - began, **said)

    about = _about(case)
    if about is not None and not trial.offers(about):
        # Said first: nothing that is given could prove a promise that is not made.
        return finding(
            Verdict.NOT_APPLICABLE,
            lack=Lack.NOT_PROMISED,
            reason=f"the profile does not offer {name_of(about)}",
        )
    missing = [need for need in case.needs if not _given(need, trial.options)]
    if missing:
        return finding(
            Verdict.NOT_APPLICABLE,
            lack=Lack.OPTION,
            reason="; ".join(need.value for need in missing),
        )
    try:
        async with asyncio.timeout_at(limit) as within:
            await _run(case, trial)
    except Unsettled as unsettled:
        return _left(case, unsettled)
    except NotHeld as failed:
        return finding(Verdict.FAIL, expected=failed.expected, seen=failed.seen)
    except NotApplicable as absent:
        return finding(Verdict.NOT_APPLICABLE, lack=absent.lack, reason=absent.reason)
    except Exception as error:
        if within.expired():
            return finding(Verdict.FAIL, expected="the run to end in time", seen=_OUT_OF_TIME)
        # An answer that is none of the schema's, or a fault of the suite: never a pass.
        seen = f"{type(error).__name__}: {brief(error)}"
        return finding(Verdict.FAIL, expected="answers that can be read", seen=seen)
    return finding(Verdict.PASS)


_STRETCH = 6.0


async def _run(case: Case, trial: Trial) -> None:
    """On a machine that does other things besides, requests turn out shorter than they were
    measured; only longer ones that end too soon as well say something of the engine."""
    try:
        await case.run(trial)
    except TooShort:
        await trial.settle()
        with trial.traffic.stretched(_STRETCH):
            await case.run(trial)


_ORDERS = {
    "lora": pb.ADMIN_OPERATION_KIND_LOAD_LORA,
    "profiling": pb.ADMIN_OPERATION_KIND_PROFILE,
    "reconfigure": pb.ADMIN_OPERATION_KIND_RECONFIGURE_SERVING,
    "release": pb.ADMIN_OPERATION_KIND_RELEASE_RESOURCES,
    "session": pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS,
    "update": pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS,
}


def _about(case: Case) -> Kind | None:
    """The order that a case is about, by its group or by what it needs."""
    if Need.WEIGHTS in case.needs:
        return pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS
    return _ORDERS.get(case.id.partition(".")[0])


def _given(need: Need, options: Options) -> bool:
    return {
        Need.INFERENCE: options.inference is not None,
        Need.HOOK: options.hook is not None,
        Need.DESTRUCTIVE: options.destructive,
        Need.CREDENTIAL: options.admin.token is not None,
        Need.REFUSED: bool(options.refused_tokens),
        Need.WEIGHTS: options.weights is not None,
        Need.COPY: options.weights_copy is not None,
        Need.SCRATCH: options.places.scratch is not None,
        Need.SHARED: options.places.shared_prefix is not None,
    }[need]


async def _mended(trial: Trial, unsettled: Exception) -> bool:
    """Whether a restart helps an engine that cannot be brought back otherwise."""
    if trial.options.hook is None or isinstance(unsettled, SomebodyElse):
        return False
    trial.broken = True
    try:
        await trial.settle()
    except (Unsettled, grpc.aio.AioRpcError):
        return False
    return True


def _left(case: Case, unsettled: Exception) -> Finding:
    return Finding(
        case=case,
        verdict=Verdict.FAIL,
        seconds=0.0,
        expected="the engine to return to what it was before the case",
        seen=str(unsettled),
    )


def _not_tried(case: Case, culprit: Case) -> Finding:
    return _untried(case, f"the engine did not recover from {culprit.id}")


_OUT_OF_TIME = "the time limit of the run had passed"


def _untried(case: Case, reason: str) -> Finding:
    return Finding(
        case=case,
        verdict=Verdict.NOT_APPLICABLE,
        seconds=0.0,
        lack=Lack.NOT_TRIED,
        reason=reason,
    )


def _engine(trial: Trial) -> dict[str, object]:
    profile = trial.start
    return {
        "instance_id": profile.instance_id,
        "revision": profile.revision,
        "world_size": profile.world_size,
        "models": list(profile.models),
    }


def run(cases: Sequence[Case], options: Options, told: Callable[[Finding], None]) -> Report:
    """For a caller without an event loop. Ctrl-C and SIGTERM end it after the way back, and then
    raise KeyboardInterrupt; a second Ctrl-C ends it at once."""

    async def to_the_end() -> Report:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await run_suite(cases, options, told=told)

    try:
        return asyncio.run(to_the_end())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
