"""Who stands behind a call, for the audit."""

from __future__ import annotations

from dataclasses import dataclass

from app.domain.operation import Actor


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """`note`: the caller's own words (`reason` in a body). `source`: network address. `scopes`:
    those that were asked of the caller."""

    actor: Actor | None = None
    note: str | None = None
    request_id: str | None = None
    trace_id: str | None = None
    source: str | None = None
    scopes: tuple[str, ...] = ()
