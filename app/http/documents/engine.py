"""An engine: its registration, and what is known of it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field

from app.domain.engine import Dialect, Engine, HealthState, Registration
from app.domain.facts import EngineFacts
from app.domain.freezes import Freeze
from app.domain.kinds import (
    Admission,
    EngineRole,
    NewRequests,
    PauseMode,
    ResourceKind,
    RevisionSource,
    WeightsState,
)
from app.http.documents.actor import ActorDocument


class MemberDocument(BaseModel):
    rank: int
    admin: str
    control: str


class TlsDocument(BaseModel):
    server_name: str | None
    credential: str | None = Field(description="The name of a credential in the settings")


class HealthDocument(BaseModel):
    state: HealthState
    observed_at: datetime | None


class PauseDocument(BaseModel):
    mode: PauseMode | None = Field(description="null: another client's, and the engine has no word")
    epoch: int
    by: str = Field(description="An operation id, or external")
    since: datetime | None
    new_requests: NewRequests
    hold_limit_ms: int | None
    requests_kept: int
    requests_held: int


class WeightsDocument(BaseModel):
    version: str | None
    state: WeightsState
    updates_since_flush: int


class LoraDocument(BaseModel):
    name: str
    id: int


class ProfileFactDocument(BaseModel):
    id: str
    kind: str
    state: str


class FactsDocument(BaseModel):
    """What the engine itself has acknowledged, at `observed_at`."""

    admission: Admission
    pause: PauseDocument | None
    pause_epoch: int
    released: list[ResourceKind]
    release_epoch: int
    weights: WeightsDocument
    role: EngineRole
    profile: ProfileFactDocument | None
    loras: list[LoraDocument]
    instance_id: str
    observed_at: datetime

    @classmethod
    def of(cls, facts: EngineFacts) -> FactsDocument:
        pause, weights, profile = facts.pause, facts.weights, facts.profile
        return cls(
            admission=facts.admission,
            pause=None
            if pause is None
            else PauseDocument(
                mode=pause.mode,
                epoch=pause.epoch,
                by=pause.by,
                since=pause.since,
                new_requests=pause.new_requests,
                hold_limit_ms=pause.hold_limit_ms,
                requests_kept=pause.requests_kept,
                requests_held=pause.requests_held,
            ),
            pause_epoch=facts.pause_epoch,
            released=sorted(facts.released),
            release_epoch=facts.release_epoch,
            weights=WeightsDocument(
                version=weights.version,
                state=weights.state,
                updates_since_flush=weights.updates_since_flush,
            ),
            role=facts.role,
            profile=None
            if profile is None
            else ProfileFactDocument(id=profile.id, kind=profile.kind, state=profile.state),
            loras=[LoraDocument(name=lora.name, id=lora.id) for lora in facts.loras],
            instance_id=facts.instance_id,
            observed_at=facts.observed_at,
        )


class FreezeDocument(BaseModel):
    """For a time the engine takes no new orders."""

    reason: str
    until: datetime
    since: datetime
    by: ActorDocument

    @classmethod
    def of(cls, freeze: Freeze) -> FreezeDocument:
        return cls(
            reason=freeze.reason,
            until=freeze.until,
            since=freeze.since,
            by=ActorDocument.of(freeze.by),
        )


class EngineDocument(BaseModel):
    id: str
    dialect: Dialect
    members: list[MemberDocument]
    tls: TlsDocument
    labels: dict[str, str]
    generation: int = Field(description='Of the registration; If-Match: "g…" to change it')
    revision: int | None = Field(description="null: never read")
    revision_source: RevisionSource | None
    health: HealthDocument
    facts: FactsDocument | None
    running_operation: str | None
    frozen: FreezeDocument | None = Field(description="The freeze in force")
    created_at: datetime
    updated_at: datetime

    @classmethod
    def of(cls, engine: Engine) -> EngineDocument:
        registration, observed = engine.registration, engine.observed
        facts = observed.facts
        return cls(
            **_registered(registration),
            revision=None if facts is None else facts.revision,
            revision_source=None if facts is None else facts.revision_source,
            health=HealthDocument(state=observed.health, observed_at=observed.observed_at),
            facts=None if facts is None else FactsDocument.of(facts),
            running_operation=engine.running_operation,
            frozen=None if engine.freeze is None else FreezeDocument.of(engine.freeze),
        )


def _registered(registration: Registration) -> dict[str, Any]:
    return {
        "id": registration.id,
        "dialect": registration.dialect,
        "members": [
            MemberDocument(rank=m.rank, admin=m.admin, control=m.control)
            for m in registration.members
        ],
        "tls": TlsDocument(
            server_name=registration.tls.server_name, credential=registration.tls.credential
        ),
        "labels": dict(registration.labels),
        "generation": registration.generation,
        "created_at": registration.created_at,
        "updated_at": registration.updated_at,
    }


class EnginePage(BaseModel):
    items: list[EngineDocument]
    next_page_token: str | None
