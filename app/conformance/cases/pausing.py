"""What a pause does to admission and to requests."""

from __future__ import annotations

import asyncio

import grpc

from app.conformance.case import Case, Need, NotPromised, case, expect
from app.conformance.client import brief, completed_of
from app.conformance.orders import named
from app.conformance.traffic import STILL_S, Generation, TooShort
from app.conformance.trial import IN_THE_MIDST_S, Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

DRAIN, ABORT, KEEP = pb.PAUSE_MODE_DRAIN, pb.PAUSE_MODE_ABORT, pb.PAUSE_MODE_KEEP
HOLD, REFUSE = pb.NEW_REQUESTS_HOLD, pb.NEW_REQUESTS_REFUSE
_TOKENS = 4


@case(
    "pause.each-mode",
    "A pause of each offered mode takes effect: admission is PAUSED, and the state names mode,"
    " epoch, operation and key; the resume opens admission again.",
)
async def each_mode(trial: Trial) -> None:
    trial.require_pauses()
    for mode in trial.profile.pause_modes:
        request = trial.orders.pause(mode)
        told = await trial.client.told(request)
        completed_of(told)
        profile = await trial.client.profile()
        state, pause = profile.state, profile.state.pause
        for name, wanted, found in (
            ("admission", pb.ADMISSION_STATE_PAUSED, state.admission),
            ("mode", mode, pause.mode),
            ("epoch", profile.pause_epoch, pause.epoch),
            ("operation", told.events[0].operation_id, pause.operation_id),
            ("key", request.idempotency_key, pause.idempotency_key),
            ("new requests", HOLD, pause.new_requests),
        ):
            expect(wanted == found, f"{name} {wanted} under a pause", brief(found))
        await trial.resumed()
        state = (await trial.client.profile()).state
        opened = state.admission == pb.ADMISSION_STATE_OPEN and not state.HasField("pause")
        expect(opened, "admission OPEN and no pause after the resume", brief(state))


@case(
    "pause.nothing-is-generated",
    "Under a pause of any mode, and whatever it does with new requests, no request makes progress.",
    Need.INFERENCE,
)
async def nothing_generated(trial: Trial) -> None:
    trial.require_pauses()
    for mode in trial.profile.pause_modes:
        seconds = IN_THE_MIDST_S / 4 if mode == DRAIN else IN_THE_MIDST_S * 10
        async with trial.traffic.running(seconds) as running:
            async with trial.paused(mode=mode):
                asked = trial.traffic.ask(_TOKENS)
                still = await running.stands_still()
                name = named(pb.PauseMode, mode)
                expect(still, f"a request in flight to stand still under {name}", running)
                expect(asked.tokens == 0, f"a new request to wait under {name}", asked)
            trial.traffic.hang_up()


@case(
    "pause.drain-lets-finish",
    "A drain lets the requests in flight finish; meanwhile admission is DRAINING, and it has taken"
    " effect when the last one has ended.",
    Need.INFERENCE,
)
async def drain(trial: Trial) -> None:
    trial.require_pauses(DRAIN)
    async with trial.traffic.running(IN_THE_MIDST_S) as running:
        stream = trial.client.send(trial.orders.pause(DRAIN))
        await stream.first()
        await trial.until_draining(running)
        completed = completed_of(await stream.rest())
        await running.over(trial.patience_s, "before the drain completes")
        expect(running.whole, "the request to finish by itself", running)
        expect(running.tokens >= running.asked, f"{running.asked} tokens", running)
        counted = (completed.pause.requests_finished, completed.pause.requests_aborted)
        expect(counted == (1, 0), "1 request finished, 0 aborted", f"{counted}")
    await trial.resumed()


@case(
    "pause.abort-ends",
    "A pause with ABORT ends the requests in flight, and tells them so.",
    Need.INFERENCE,
)
async def abort(trial: Trial) -> None:
    trial.require_pauses(ABORT)
    async with trial.traffic.running(IN_THE_MIDST_S * 10) as running:
        completed = await trial.client.completed(trial.orders.pause(ABORT))
        await running.over(trial.patience_s, "with the pause")
        if running.whole:
            raise TooShort
        cancelled = running.end in ("CANCELLED", "DRAINING")
        expect(cancelled, "the request to be told that it was cancelled", running)
        ended = completed.pause.requests_aborted
        expect(ended == 1, "1 request aborted", ended)
    await trial.resumed()


@case(
    "pause.keep-continues",
    "A pause with KEEP freezes the requests in flight; the resume continues them to their end as if"
    " nothing had been.",
    Need.INFERENCE,
)
async def keep(trial: Trial) -> None:
    trial.require_pauses(KEEP)
    async with trial.traffic.running(IN_THE_MIDST_S) as running:
        completed = await trial.client.completed(trial.orders.pause(KEEP))
        if running.end is not None:
            raise TooShort
        still = await running.stands_still()
        expect(still, "the request to stand still", running)
        expect(completed.pause.requests_kept == 1, "1 request kept", completed.pause.requests_kept)
        resumed = await trial.resumed()
        continued = resumed.resume.requests_continued
        expect(continued == 1, "1 request to be continued", continued)
        await running.over(trial.patience_s, "after the resume")
        expect(running.whole, "the request to finish by itself", running)
        expect(running.tokens >= running.asked, f"{running.asked} tokens in all", running)


async def _let_in(trial: Trial, held: Generation) -> None:
    await held.over(trial.patience_s, "after the resume")
    expect(held.whole, "the held request to be answered after the resume", held)


@case(
    "pause.hold",
    "With HOLD, which is also the default, a request that arrives under a pause waits and is"
    " answered after the resume.",
    Need.INFERENCE,
)
async def hold(trial: Trial) -> None:
    trial.require_pauses()
    if HOLD not in trial.profile.new_requests:
        raise NotPromised("the profile does not offer to hold new requests")
    for fields in ({}, {"new_requests": HOLD}):
        async with trial.paused(**fields):
            held = trial.traffic.ask(_TOKENS)
            await asyncio.sleep(STILL_S)
            waits = held.end is None and held.tokens == 0
            expect(waits, "a new request to wait", held)
            counted = (await trial.client.profile()).state.pause.requests_held
            expect(counted == 1, "1 request held", counted)
        await _let_in(trial, held)


@case(
    "pause.refuse",
    "With REFUSE a request that arrives under a pause is refused at once; after the resume requests"
    " are answered.",
    Need.INFERENCE,
)
async def refuse(trial: Trial) -> None:
    trial.require_pauses()
    if REFUSE not in trial.profile.new_requests:
        raise NotPromised("the profile does not offer to refuse new requests")
    async with trial.paused(new_requests=REFUSE):
        turned_back = trial.traffic.ask(_TOKENS)
        await turned_back.over(trial.patience_s, "while admission is closed")
        code = turned_back.refusal.code if turned_back.refusal else None
        unavailable = code is grpc.StatusCode.UNAVAILABLE
        expect(unavailable, "the request to be refused with UNAVAILABLE", turned_back)
    await _let_in(trial, trial.traffic.ask(_TOKENS))


@case(
    "pause.hold-limit",
    "A request is not held longer than the pause says: it then ends with an error, and the pause"
    " goes on.",
    Need.INFERENCE,
)
async def hold_limit(trial: Trial) -> None:
    trial.require_pauses()
    if HOLD not in trial.profile.new_requests:
        raise NotPromised("the profile does not offer to hold new requests")
    async with trial.paused(hold_limit_ms=300):
        held = trial.traffic.ask(_TOKENS)
        await held.over(trial.patience_s, "at the end of its hold limit")
        expect(not held.whole and not held.tokens, "the held request to end with an error", held)
        admission = (await trial.client.profile()).state.admission
        expect(
            admission == pb.ADMISSION_STATE_PAUSED,
            "admission PAUSED",
            named(pb.AdmissionState, admission),
        )


@case(
    "pause.hold-limit-range",
    "A hold limit of 0, or beyond the longest that the profile states, is INVALID_ARGUMENT.",
)
async def hold_limit_range(trial: Trial) -> None:
    longest = trial.profile.limits.max_hold_limit_ms
    for limit in (0, longest + 1) if longest else (0,):
        async with trial.unchanged(f"a pause with a hold limit of {limit} ms"):
            request = trial.pause(hold_limit_ms=limit)
            await trial.client.refused(request, grpc.StatusCode.INVALID_ARGUMENT)


CASES: tuple[Case, ...] = (
    each_mode,
    nothing_generated,
    drain,
    abort,
    keep,
    hold,
    refuse,
    hold_limit,
    hold_limit_range,
)
