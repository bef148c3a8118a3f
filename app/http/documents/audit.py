"""One entry of the audit."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field, JsonValue

from app.http.documents.actor import ActorDocument
from app.ledger.values import StoredAudit

Fields = dict[str, JsonValue]


class AuditDocument(BaseModel):
    id: int
    at: datetime
    action: str
    outcome: str
    principal: ActorDocument | None
    engine: str | None
    operation: str | None
    reason: str | None
    note: str | None = Field(description="The caller's own words")
    request_id: str | None
    trace_id: str | None
    source: str | None
    scopes: list[str] = Field(description="Those that the call takes")
    detail: Fields

    @classmethod
    def of(cls, stored: StoredAudit) -> AuditDocument:
        entry = stored.entry
        actor = entry.actor
        return cls(
            id=stored.id,
            at=entry.at,
            action=entry.action,
            outcome=entry.outcome,
            principal=None if actor is None else ActorDocument.of(actor),
            engine=entry.engine_id,
            operation=entry.operation_id,
            reason=entry.reason,
            note=entry.note,
            request_id=entry.request_id,
            trace_id=entry.trace_id,
            source=entry.source,
            scopes=list(entry.scopes),
            detail=dict(entry.detail),
        )


class AuditPage(BaseModel):
    items: list[AuditDocument]
    next_page_token: str | None
