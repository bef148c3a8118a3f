"""Who it was."""

from __future__ import annotations

from pydantic import BaseModel

from app.domain.operation import Actor


class ActorDocument(BaseModel):
    issuer: str
    subject: str
    client_id: str

    @classmethod
    def of(cls, actor: Actor) -> ActorDocument:
        return cls(issuer=actor.issuer, subject=actor.subject, client_id=actor.client_id)
