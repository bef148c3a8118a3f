"""Registering engines under a policy: labels decide who may do what, so they are not for everyone
to choose."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import Request

from app.auth.policy.rules import Permit, RefusedByPolicy
from app.auth.requires import permit_of
from app.domain.engine import Engine, Member
from app.domain.errors import GenerationMismatch
from app.domain.scopes import Scope
from app.http.addresses import engines_at
from app.http.rooms import Rooms, rooms_of
from app.operations.registering import EngineChange, EngineDraft


def _beyond(what: str) -> RefusedByPolicy:
    return RefusedByPolicy(f"The gateway's policy does not let you {what}.")


async def refuse_beyond_policy(request: Request, draft: EngineDraft) -> None:
    """Raises RefusedByPolicy unless the caller may manage an engine of that id and labels, and has
    no more scopes on it than on any engine that is registered with the same addresses."""
    permit = permit_of(request)
    if permit.unlimited:
        return
    has = permit.scopes_on(draft.id, draft.labels)
    if Scope.ENGINES not in has:
        raise _beyond("have an engine of this id and these labels")
    await _refuse_addresses(rooms_of(request), permit, draft.id, draft.members, has)


async def refuse_change_beyond_policy(
    request: Request, engine: Engine, change: EngineChange, expected_generation: int
) -> None:
    """Raises RefusedByPolicy where the caller could no longer manage the engine, would have more
    scopes on it than before, or it would get addresses as above; GenerationMismatch where it was
    changed since it was looked up, so that what is judged is what is changed."""
    permit = permit_of(request)
    if permit.unlimited:
        return
    if engine.registration.generation != expected_generation:
        raise GenerationMismatch(
            f"expected generation {expected_generation}, the current generation is "
            f"{engine.registration.generation}"
        )
    known = engine.registration
    had = permit.scopes_on(engine.id, known.labels)
    has = permit.scopes_on(engine.id, known.labels if change.labels is None else change.labels)
    if Scope.ENGINES not in has or not has <= had:
        raise _beyond("give an engine these labels")
    members = known.members if change.members is None else change.members
    await _refuse_addresses(rooms_of(request), permit, engine.id, members, has)


async def _refuse_addresses(
    rooms: Rooms,
    permit: Permit,
    engine_id: str,
    members: Iterable[Member],
    has: frozenset[Scope],
) -> None:
    """An engine that is registered once more, under labels of the caller's choice, would be the
    caller's. Not covered: another spelling of the same address."""
    async for other in engines_at(rooms, engine_id, members):
        if not has <= permit.scopes_on(other.id, other.registration.labels):
            raise _beyond("have an engine at these addresses")
