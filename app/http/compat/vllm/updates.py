"""Weights that a trainer sends in several calls. From start to finish they are ONE operation of the
ledger, a weight session.

    init       says how the pieces travel; it is kept for the start
    start      begins the session. Where pieces come from disk it begins with the first of them,
               which says where they lie
    update     one piece, waited for until every rank has staged it
    finish     commits, under the version that it names
    shutdown   calls a session off that is open, and forgets what init said
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from app.domain.commands import UnderPause, UpdateWeights
from app.domain.errors import UnknownSession
from app.domain.facts import EngineFacts
from app.domain.kinds import Component, OperationKind, OperationState, WeightTransferBackend
from app.domain.weight_sessions import (
    AbortSession,
    CommitSession,
    NcclTransfer,
    SessionWeights,
    Transfer,
    check_version,
)
from app.http.compat.announcements import Announced
from app.http.compat.asked import Asked, field
from app.http.compat.checkpoints import (
    UNNAMED,
    cache_policy_under,
    keep_whole,
    refuse_unless_as_started,
    refuse_unless_still,
    update_by,
)
from app.http.compat.giving import CompatCall
from app.http.compat.joining import join
from app.http.compat.refusals import BadBody, WouldHarm
from app.http.compat.sessions import (
    LEASE_MS,
    OpenSession,
    begin_session,
    close_session,
    open_session_of,
    take_piece,
    transfer_of_latest,
)
from app.http.compat.transfers import Piece, piece_of, transfer_of, ways


def init_asked(asked: Asked) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", field(asked.model(), "init_info", dict))


def start_asked(asked: Asked) -> None:
    """Trainers send what an earlier release took; vLLM does not look at it."""
    asked.agrees_with({"is_checkpoint_format": True})


def update_asked(asked: Asked) -> Any:
    body = asked.model()
    if isinstance(body.get("update_info"), list):
        return body["update_info"]
    return field(body, "update_info", dict)


def finish_asked(asked: Asked) -> str | None:
    version = field(asked.model(optional=True), "weight_version", str, default=None)
    if version is not None:
        check_version(version, "/weight_version")
    return cast("str | None", version)


async def init(call: CompatCall, init_info: Mapping[str, Any]) -> None:
    """Where engines join a group by a call of its own, this is it: whoever opens the group waits
    for them in theirs."""
    transfer = transfer_of(init_info, ways(call.can))
    if isinstance(transfer, NcclTransfer):
        await join(call, transfer)
    call.house.announcements.keep(call.engine.id, call.actor, Announced(transfer))


async def start(call: CompatCall, _: None) -> None:
    await _start(call, Component.TARGET)


async def start_draft(call: CompatCall, _: None) -> None:
    await _start(call, Component.DRAFT)


async def _start(call: CompatCall, component: Component) -> None:
    found = await open_session_of(call)
    if found is not None:
        taken = await call.house.ledger.stages.taken(found.operation.id)
        if taken.calls or found.components != (component,):
            raise WouldHarm(
                "a weight update of yours is open: finish it, or shut the transfer down"
            )
        return  # the same call once more, and nothing has come since
    announced = await _announced(call)
    facts = await call.facts()
    refuse_unless_still(facts)
    if announced.transfer is not None:
        await _begin(call, announced.transfer, component, facts, check_finite=False)
    else:
        waits = Announced(None, component, facts.pause_epoch)
        call.house.announcements.keep(call.engine.id, call.actor, waits)


async def update(call: CompatCall, update_info: Any) -> None:
    found = await open_session_of(call)
    if found is None:
        announced = call.house.announcements.of(call.engine.id, call.actor)
        if announced is None or announced.component is None:
            raise WouldHarm("start_weight_update must be called before update_weights.")
        piece = piece_of(update_info, None)
        assert piece.transfer is not None
        facts = await call.facts()
        refuse_unless_still(facts)
        refuse_unless_as_started(announced, facts)
        component, finite = announced.component, piece.check_finite
        if WeightTransferBackend.DISK not in call.can.weight_sessions:
            keep_whole(call, announced, piece)
            return
        if piece.checkpoint is not None and piece.checkpoint.digests:
            raise BadBody("update_info.files goes with a checkpoint that is taken as a whole")
        found = await _begin(call, piece.transfer, component, facts, check_finite=finite)
        call.house.announcements.keep(call.engine.id, call.actor, Announced())
    else:
        piece = _piece_for(found, update_info)
    await take_piece(call, found, piece.payload)


async def finish(call: CompatCall, version: str | None) -> None:
    found = await open_session_of(call)
    if found is None:
        announced = call.house.announcements.of(call.engine.id, call.actor)
        if announced is not None and announced.checkpoint is not None:
            await update_by(call, announced, announced.checkpoint, version)
        else:
            await _finished_already(call, version)
        return
    taken = await call.house.ledger.stages.taken(found.operation.id)
    try:
        operation = await close_session(call, found, CommitSession(taken.chunks, version), "finish")
    except UnknownSession:  # it has ended meanwhile, by the same call most likely
        await _finished_already(call, version)
        return
    operation = await call.ended(operation)
    told = (operation.result or {}).get("weight_version")
    if version is not None and told != version:
        raise WouldHarm("the weights are updated, and the engine has not taken their version on")


async def shutdown(call: CompatCall, _: None) -> None:
    found = await open_session_of(call)
    if found is not None:
        operation = await close_session(
            call, found, AbortSession("the transfer was shut down"), "shutdown"
        )
        await call.until(operation, lambda one: one.done)
    call.house.announcements.keep(call.engine.id, call.actor, Announced(shut=True))


async def _begin(
    call: CompatCall,
    transfer: Transfer,
    component: Component,
    facts: EngineFacts,
    *,
    check_finite: bool,
) -> OpenSession:
    command = UpdateWeights(
        source=SessionWeights(f"{call.layer}-{call.house.new_id()}", transfer, LEASE_MS),
        # What it is called is said at the end; until then, and without that, it stays.
        weight_version=facts.weights.version or UNNAMED,
        cache_policy=cache_policy_under(call, facts),
        admission=UnderPause(facts.pause_epoch or None),
        components=(component,),
        check_finite=check_finite,
    )
    return await begin_session(call, command)


async def _announced(call: CompatCall) -> Announced:
    """What init said; after a restart of the gateway, what the caller's latest update was by."""
    known = call.house.announcements.of(call.engine.id, call.actor)
    if known is not None and not known.shut:
        return known
    latest = None if known is not None else await call.latest(OperationKind.UPDATE_WEIGHTS)
    transfer = transfer_of_latest(call, latest)
    if isinstance(transfer, NcclTransfer):
        return Announced(transfer)
    if WeightTransferBackend.DISK in ways(call.can):
        return Announced()  # of files nothing has to be said before
    raise WouldHarm("Weight transfer not initialized. Call init_weight_transfer_engine first.")


async def _finished_already(call: CompatCall, version: str | None) -> None:
    """Whether this is a finish once more, of an update that has ended so."""
    announced = call.house.announcements.of(call.engine.id, call.actor)
    if announced is not None and announced.component is not None:
        raise WouldHarm("no weights were sent since start_weight_update")
    latest = await call.latest(OperationKind.UPDATE_WEIGHTS)
    if latest is not None and (latest.reason or "").startswith(f"{call.layer.product} endpoint"):
        if not latest.done:
            latest = await call.ended(latest)
        told = (latest.result or {}).get("weight_version")
        succeeded = latest.state is OperationState.SUCCEEDED
        same = succeeded and version in (None, told)
        if same and (await call.facts()).revision == latest.revision:
            return
    raise WouldHarm("finish_weight_update called without a matching start_weight_update.")


def _piece_for(found: OpenSession, update_info: Any) -> Piece:
    piece = piece_of(update_info, found.transfer)
    if piece.transfer is not None and piece.transfer != found.transfer:
        raise BadBody("the pieces of one update from disk lie in one folder")
    return piece
