"""Weights that a trainer broadcasts. In SGLang each call changes the weights for itself; here all
of one update are ONE order, a weight session, that takes effect as a whole.

    init_weights_update_group        how they travel; kept until it is destroyed
    begin_weight_update              an update begins, with its first piece
    update_weights_from_distributed  one piece, waited for until every rank has it
    end_weight_update                the commit

Clients of releases before `begin` send pieces alone, under a pause. Such an update is over with
whatever relies on it: `continue_generation`, a flush, memory taken back. A pause, or another group,
says that it was given up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import cast

from app.domain.commands import AbortRequests, PauseAround, UnderPause, UpdateWeights
from app.domain.errors import (
    ChadburnError,
    DrainRunning,
    NotPaused,
    ResourcesReleased,
    UnknownSession,
)
from app.domain.facts import EngineFacts
from app.domain.kinds import (
    Admission,
    CachePolicy,
    Component,
    NewRequests,
    OperationKind,
    OperationState,
    PauseMode,
    ResourceKind,
)
from app.domain.scopes import Scope
from app.domain.weight_sessions import (
    AbortSession,
    CommitSession,
    NcclChunk,
    NcclTransfer,
    SessionWeights,
    Transfer,
    check_version,
)
from app.http.compat.announcements import Announced
from app.http.compat.checkpoints import UNNAMED
from app.http.compat.giving import CompatCall
from app.http.compat.joining import join
from app.http.compat.pauses import pause_of
from app.http.compat.refusals import BadBody, OutcomeUnknown, WouldHarm
from app.http.compat.sessions import (
    LEASE_MS,
    OpenSession,
    begin_session,
    close_session,
    open_session_of,
    take_piece,
    transfer_of_latest,
)
from app.http.compat.sglang.bodies import (
    BeginBody,
    DistributedBody,
    EndBody,
    GroupBody,
    GroupNameBody,
)
from app.http.compat.sglang.opening import open_again
from app.http.compat.sglang.transfers import group_of, specs_of

_SINGLE = "single"
_BOUNDED = "bounded"


async def init(call: CompatCall, body: GroupBody) -> str:
    """What became of it, in words."""
    transfer = group_of(body)
    known = call.house.announcements.of(call.engine.id, call.actor)
    if known is not None and known.transfer == transfer:
        return "The group is known."
    if _named_alike(known, body.group_name):
        raise WouldHarm("there is such a group already: destroy it first")
    await call_off(call)
    joined = await join(call, transfer)
    call.house.announcements.keep(call.engine.id, call.actor, Announced(transfer))
    if joined:
        return "The engine has joined the group."
    return "The group is known; the engine joins it when an update begins."


async def destroy(call: CompatCall, body: GroupNameBody) -> None:
    known = await _announced(call)
    if not _named_alike(known, body.group_name):
        raise WouldHarm("there is no such group")
    await call_off(call)
    await open_again(call)
    call.house.announcements.keep(call.engine.id, call.actor, Announced(shut=True))


async def begin(call: CompatCall, body: BeginBody) -> None:
    """Kept until the first piece, which says by which group it comes."""
    if await open_session_of(call) is not None:
        raise WouldHarm("a weight update of yours is open: end it first")
    known = await _announced(call) or Announced()
    kept = replace(known, component=Component.TARGET, selector=body.selector)
    call.house.announcements.keep(call.engine.id, call.actor, kept)


async def end(call: CompatCall, _: EndBody) -> None:
    found = await open_session_of(call)
    if found is not None:
        await commit(call, found)
        return
    known = call.house.announcements.of(call.engine.id, call.actor)
    if known is not None and known.selector is not None:
        _begun_no_more(call)
        return  # nothing was sent
    latest = await call.latest(OperationKind.UPDATE_WEIGHTS)
    if latest is not None and transfer_of_latest(call, latest) is not None:
        ended = latest if latest.done else await call.ended(latest)
        again = ended.state is OperationState.SUCCEEDED
        if again and (await call.facts()).revision == ended.revision:
            return  # the same call once more
    raise WouldHarm("end_weight_update without a begin_weight_update")


async def piece(call: CompatCall, body: DistributedBody) -> None:
    payload = NcclChunk(tensors=specs_of(body))
    if body.load_format is not None:
        raise BadBody("load_format is not taken: tensors come one by one, as they are named")
    if body.weight_version is not None:
        check_version(body.weight_version, "/weight_version")
    found = await open_session_of(call)
    if found is None:
        known = await _announced(call)
        transfer = None if known is None else known.transfer
        if not isinstance(transfer, NcclTransfer) or transfer.group != body.group_name:
            raise WouldHarm("there is no such group: call init_weights_update_group first")
        first = Beginning(
            transfer=transfer,
            selector=body.selector,
            weight_version=body.weight_version,
            flush_cache=body.flush_cache,
            abort_all_requests=body.abort_all_requests,
            take=lambda begun: take_piece(call, begun, payload),
        )
        await begin_with(call, first)
        return
    if not isinstance(found.transfer, NcclTransfer) or found.transfer.group != body.group_name:
        raise WouldHarm("the pieces of one update come by one group")
    refuse_another_version(found, body.weight_version)
    await take_piece(call, found, payload)


def refuse_another_version(found: OpenSession, version: str | None) -> None:
    if version not in (None, found.update.weight_version):
        raise WouldHarm("the pieces of one update have one version")


async def commit(call: CompatCall, found: OpenSession) -> None:
    taken = await call.house.ledger.stages.taken(found.operation.id)
    try:
        operation = await close_session(call, found, CommitSession(taken.chunks), "commit")
    except UnknownSession:  # it has ended meanwhile
        latest = await call.latest(OperationKind.UPDATE_WEIGHTS)
        operation = found.operation if latest is None else latest
    await call.ended(operation)
    _begun_no_more(call)


async def commit_singles(call: CompatCall) -> None:
    """Of pieces that no `begin` stands before: this is where their update ends."""
    found = await open_session_of(call)
    if found is not None and found.session_id.startswith(f"{call.layer}-{_SINGLE}-"):
        await call.need(Scope.WEIGHTS)
        await commit(call, found)


async def refuse_open(call: CompatCall) -> None:
    if await open_session_of(call) is not None:
        raise WouldHarm("a weight update of yours is open: end it first")


async def call_off(call: CompatCall) -> None:
    found = await open_session_of(call)
    if found is not None:
        await call.need(Scope.WEIGHTS)
        stage = AbortSession("its trainer has begun anew")
        operation = await close_session(call, found, stage, "call off")
        await call.until(operation, lambda one: one.done)
    _begun_no_more(call)


async def admission_of(
    call: CompatCall, facts: EngineFacts, *, abort_all: bool
) -> UnderPause | PauseAround:
    """Under the pause in force; where there is none the update makes its own, and waits for
    requests that run, or ends them, as it was asked for. Raises DrainRunning,
    ResourcesReleased."""
    if facts.admission is Admission.DRAINING:
        raise DrainRunning("a pause is still waiting for requests: wait for its end")
    if ResourceKind.WEIGHTS in facts.released:
        raise ResourcesReleased("the weights are released: resume their memory first")
    if facts.admission is Admission.PAUSED:
        if abort_all and facts.pause is not None and facts.pause.mode is PauseMode.KEEP:
            await call.need(Scope.ABORT)
            await call.give(AbortRequests(all=True), "abort")
        return UnderPause(facts.pause_epoch or None)
    holds = NewRequests.HOLD in call.can.new_requests
    drains = PauseMode.DRAIN in call.can.pause_modes and not abort_all
    return PauseAround(
        PauseMode.DRAIN if drains else PauseMode.ABORT,
        NewRequests.HOLD if holds else NewRequests.REFUSE,
    )


def cache_policy_of(call: CompatCall, facts: EngineFacts, *, flush: bool) -> CachePolicy:
    """Requests that are frozen go on from what they have."""
    frozen = facts.pause is not None and facts.pause.mode is PauseMode.KEEP
    keeps = (frozen or not flush) and CachePolicy.KEEP in call.can.cache_policies
    return CachePolicy.KEEP if keeps else CachePolicy.FLUSH


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What a first piece says of its update."""

    transfer: Transfer
    selector: str
    weight_version: str | None
    flush_cache: bool
    abort_all_requests: bool
    take: Callable[[OpenSession], Awaitable[None]]


async def begin_with(call: CompatCall, first: Beginning) -> None:
    """An update with its first piece."""
    known = call.house.announcements.of(call.engine.id, call.actor)
    bounded = None if known is None else known.selector
    facts = await call.facts()
    if bounded is None and facts.admission is Admission.OPEN:
        raise WouldHarm("pause the engine, or call begin_weight_update, before weights are sent")
    way = _SINGLE if bounded is None else _BOUNDED
    named = f"{call.layer}-{way}-{call.house.new_id()}"
    command = UpdateWeights(
        source=SessionWeights(named, first.transfer, LEASE_MS),
        weight_version=first.weight_version or facts.weights.version or UNNAMED,
        cache_policy=cache_policy_of(call, facts, flush=first.flush_cache),
        admission=await admission_of(call, facts, abort_all=first.abort_all_requests),
        components=_components(call, bounded or first.selector),
    )
    try:
        found = await begin_session(call, command)
        await first.take(found)
    except ChadburnError as refused:
        around = command.admission
        if not isinstance(around, PauseAround) or not await _wants_a_pause(call, refused):
            raise
        await _begin_paused(call, command, around.mode, first.take)


async def _begin_paused(
    call: CompatCall,
    command: UpdateWeights,
    mode: PauseMode,
    take: Callable[[OpenSession], Awaitable[None]],
) -> None:
    """Some engines join and receive only while they are paused, and no update pauses for that."""
    await call.give(pause_of(call, mode), "pause")
    epoch = (await call.facts()).pause_epoch or None
    begun = cast("SessionWeights", command.source)
    anew = replace(begun, session_id=f"{begun.session_id}-paused")
    try:
        under = replace(command, source=anew, admission=UnderPause(epoch))
        found = await begin_session(call, under, "start paused")
        await take(found)
    except OutcomeUnknown:
        raise
    except ChadburnError:
        await open_again(call)
        raise


async def _wants_a_pause(call: CompatCall, refused: ChadburnError) -> bool:
    """Whether that is why the session did not begin. Its pieces may be told that there is none."""
    if isinstance(refused, NotPaused):
        return True
    latest = await call.latest(OperationKind.UPDATE_WEIGHTS)
    error = None if latest is None else latest.error
    return error is not None and error.reason == NotPaused.reason


async def _announced(call: CompatCall) -> Announced | None:
    """After a restart of the gateway: the group that the caller's latest update came by."""
    known = call.house.announcements.of(call.engine.id, call.actor)
    if known is not None and (known.shut or known.transfer is not None):
        return known
    latest = await call.latest(OperationKind.UPDATE_WEIGHTS)
    transfer = transfer_of_latest(call, latest)
    if not isinstance(transfer, NcclTransfer):
        return known
    return replace(known or Announced(), transfer=transfer)


def _begun_no_more(call: CompatCall) -> None:
    known = call.house.announcements.of(call.engine.id, call.actor)
    if known is not None and known.selector is not None:
        over = replace(known, component=None, selector=None)
        call.house.announcements.keep(call.engine.id, call.actor, over)


def _named_alike(known: Announced | None, name: str) -> bool:
    transfer = None if known is None else known.transfer
    return isinstance(transfer, NcclTransfer) and transfer.group == name


def _components(call: CompatCall, selector: str) -> tuple[Component, ...]:
    if selector != "all":
        return (Component(selector),)
    return tuple(one for one in Component if one in call.can.components)
