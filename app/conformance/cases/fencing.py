"""Revisions and epochs: what keeps a late order from doing harm."""

from __future__ import annotations

import asyncio

import grpc

from app.conformance.case import Case, NotPromised, case, expect
from app.conformance.client import completed_of
from app.conformance.orders import named
from app.conformance.record import kind_of
from app.conformance.trial import Trial
from app.rpc.openengine.v1 import admin_pb2 as pb

ABORTED = grpc.StatusCode.ABORTED
WRONG_STATE = grpc.StatusCode.FAILED_PRECONDITION


@case(
    "revision.stale",
    "An order that expects another revision than the engine's is ABORTED, and nothing is changed.",
)
async def stale(trial: Trial) -> None:
    current = (await trial.client.profile()).revision
    for expected in {max(0, current - 1), 0, current + 1} - {current}:
        async with trial.unchanged(f"an order that expects revision {expected}"):
            await trial.client.refused(trial.order(expected_revision=expected), ABORTED)


@case("revision.current", "An order that expects the engine's revision is accepted at it.")
async def current(trial: Trial) -> None:
    revision = (await trial.client.profile()).revision
    told = await trial.client.told(trial.order(expected_revision=revision))
    completed_of(told)
    accepted = told.events[0].accepted.revision
    expect(accepted == revision, f"the order to be accepted at revision {revision}", accepted)


@case(
    "revision.rises-with-a-change",
    "The revision rises whenever an administrative fact changes, and an operation's end tells the"
    " one that it led to.",
)
async def rises(trial: Trial) -> None:
    request = trial.pause()
    before = (await trial.client.profile()).revision
    paused = await trial.client.completed(request)
    held = (await trial.client.profile()).revision
    expect(paused.changed, "a pause of an open engine to say that it changed something", "no")
    expect(held > before, f"a revision above {before} after a pause", held)
    expect(paused.revision == held, f"the pause to end at revision {held}", paused.revision)
    resumed = await trial.resumed()
    after = (await trial.client.profile()).revision
    expect(after > held, f"a revision above {held} after the resume", after)
    expect(resumed.revision == after, f"the resume to end at revision {after}", resumed.revision)


@case(
    "revision.still-without-a-change",
    "An order that changes nothing says so, reaches no rank, and leaves revision and epochs as they"
    " are.",
)
async def still(trial: Trial) -> None:
    async with trial.paused():
        async with trial.unchanged("a pause that says what the one in force says"):
            told = await trial.client.told(trial.pause())
            again = completed_of(told)
            expect(not again.changed, "changed = false", "changed = true")
            reached = any(kind_of(event) == "rank" for event in told.events)
            expect(not reached, "no rank to be told of it", told)
        epoch = (await trial.client.profile()).pause_epoch
        stated = again.pause.pause_epoch
        expect(stated == epoch, f"the epoch of the pause in force, {epoch}", stated)


@case(
    "revision.one-of-two-wins",
    "Of two clients that give different orders at the same revision, one at most changes the"
    " engine; the other is ABORTED.",
)
async def one_wins(trial: Trial) -> None:
    trial.require_pauses()
    if not trial.profile.pause_modes:
        raise NotPromised("the profile offers no pause mode")
    revision = (await trial.client.profile()).revision
    other = trial.connect()
    await other.profile()  # connected, so that both set out together
    one, two = await asyncio.gather(
        trial.client.told(trial.pause(expected_revision=revision)),
        other.told(trial.pause(expected_revision=revision, deadline_ms=57_000)),
    )
    accepted = [told for told in (one, two) if told.events]
    expect(len(accepted) == 1, "one of the two to be accepted", f"{one} and {two}")
    refused = one if two.events else two
    aborted = refused.refusal is not None and refused.refusal.code is ABORTED
    expect(aborted, "the other to be ABORTED", refused)


@case(
    "epoch.rises",
    "The pause epoch rises when a pause takes effect, and never goes back.",
)
async def epoch_rises(trial: Trial) -> None:
    seen = [(await trial.client.profile()).pause_epoch]
    for _ in range(2):
        async with trial.paused() as completed:
            told = completed.pause.pause_epoch
            held = (await trial.client.profile()).pause_epoch
            expect(told == held, f"the pause to tell its epoch {held}", told)
            seen.append(held)
    seen.append((await trial.client.profile()).pause_epoch)
    rising = seen[0] < seen[1] < seen[2] <= seen[3]
    expect(rising, "epochs that rise with each pause", seen)


@case(
    "epoch.stale-resume",
    "A resume names the epoch of the pause that it lifts: with any other it is FAILED_PRECONDITION,"
    " and the pause stays.",
)
async def stale_resume(trial: Trial) -> None:
    async with trial.paused():
        pass
    async with trial.paused():
        epoch = (await trial.client.profile()).pause_epoch
        for given in (epoch - 1, epoch + 1):
            if given > 0:
                async with trial.unchanged(f"a resume of epoch {given} while {epoch} holds"):
                    await trial.client.refused(trial.orders.resume(given), WRONG_STATE)


@case(
    "epoch.resume-when-open",
    "A resume while admission is open is FAILED_PRECONDITION, also with the latest epoch.",
)
async def resume_when_open(trial: Trial) -> None:
    async with trial.paused():
        pass
    epoch = (await trial.client.profile()).pause_epoch
    async with trial.unchanged("a resume of an engine that is not paused"):
        await trial.client.refused(trial.orders.resume(epoch), WRONG_STATE)


@case(
    "epoch.another-mode",
    "A pause in another mode than the one in force is a new pause under a new epoch, or it is"
    " refused; the earlier epoch lifts it no more.",
)
async def another_mode(trial: Trial) -> None:
    trial.require_pauses()
    modes = list(trial.profile.pause_modes)
    if len(modes) < 2:
        raise NotPromised("the profile offers fewer than two pause modes")
    async with trial.paused(mode=modes[0]) as first:
        told = await trial.client.told(trial.orders.pause(modes[1]))
        if told.refusal is not None:
            return  # the first one is in force, and is lifted by its epoch on the way out
        second = completed_of(told)
        rose = second.changed and second.pause.pause_epoch > first.pause.pause_epoch
        expect(rose, f"an epoch above {first.pause.pause_epoch}", second.pause.pause_epoch)
        mode = (await trial.client.profile()).state.pause.mode
        expect(mode == modes[1], f"mode {named(pb.PauseMode, modes[1])}", named(pb.PauseMode, mode))
        stale = trial.orders.resume(first.pause.pause_epoch)
        await trial.client.refused(stale, WRONG_STATE)


CASES: tuple[Case, ...] = (
    stale,
    current,
    rises,
    still,
    one_wins,
    epoch_rises,
    stale_resume,
    resume_when_open,
    another_mode,
)
