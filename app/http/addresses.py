"""Whose addresses an engine would have: one that is registered twice has two of everything that is
meant to be one, such as the slot for exclusive orders, freezes and the history."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

from starlette.requests import Request

from app.auth.requires import permit_of
from app.domain.engine import Engine, Member
from app.domain.errors import EngineAddressTaken, FieldFault
from app.domain.scopes import Scope
from app.http.rooms import Rooms, rooms_of
from app.ledger.values import EngineFilter

_PAGE = 500


async def engines_at(
    rooms: Rooms, engine_id: str, members: Iterable[Member]
) -> AsyncIterator[Engine]:
    """Those of another id with one of these addresses. Another spelling of an address is another
    address here: what a name leads to is the business of whoever connects."""
    wanted = {spelt(address) for member in members for address in _addresses(member)}
    after: str | None = None
    while True:
        page = await rooms.ledger.engines.page(EngineFilter(), after, _PAGE)
        for other in page.items:
            theirs = {spelt(at) for one in other.registration.members for at in _addresses(one)}
            if other.id != engine_id and wanted & theirs:
                yield other
        if not isinstance(page.next, str):
            return
        after = page.next


async def refuse_taken(
    request: Request, engine_id: str, members: Sequence[Member], had: Iterable[Member] = ()
) -> None:
    """Raises EngineAddressTaken. What the engine `had` before it keeps, whoever has it too. Not
    covered: two calls at the same moment."""
    kept = {spelt(address) for member in had for address in _addresses(member)}
    wanted = {
        spelt(address): f"/members/{place}/{name}"
        for place, member in enumerate(members)
        for name, address in (("control", member.control), ("admin", member.admin))
        if spelt(address) not in kept
    }
    if not wanted:
        return
    permit = permit_of(request)
    async for other in engines_at(rooms_of(request), engine_id, members):
        theirs = {spelt(at) for one in other.registration.members for at in _addresses(one)}
        places = sorted(place for address, place in wanted.items() if address in theirs)
        if places:
            seen = Scope.READ in permit.scopes_on(other.id, other.registration.labels)
            detail = f"is an address of the engine {other.id}" if seen else "is another engine's"
            raise EngineAddressTaken(detail, faults=tuple(FieldFault(at, detail) for at in places))


def _addresses(member: Member) -> tuple[str, str]:
    return member.admin, member.control


def spelt(address: str) -> str:
    """Names of hosts are the same in either case; paths of sockets are not."""
    return address if address.startswith("unix:") else address.lower()
