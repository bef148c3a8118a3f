"""Adapters of an engine."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel

from app.domain.facts import EngineFacts


class AdapterDocument(BaseModel):
    name: str
    id: int
    path: str


class AdaptersDocument(BaseModel):
    items: list[AdapterDocument]
    observed_at: datetime

    @classmethod
    def of(cls, facts: EngineFacts) -> AdaptersDocument:
        return cls(
            items=[
                AdapterDocument(name=lora.name, id=lora.id, path=lora.path) for lora in facts.loras
            ],
            observed_at=facts.observed_at,
        )
