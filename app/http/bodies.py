"""What may be sent: strict shapes, nothing unknown, and the domain's own words out of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from app.domain.commands import (
    AbortRequests,
    Command,
    FlushCaches,
    Pause,
    ReleaseResources,
    RestoreResources,
    Resume,
    Shutdown,
)
from app.domain.engine import Dialect, Member, TlsNames
from app.domain.kinds import (
    CacheKind,
    ContentPolicy,
    DrainRule,
    NewRequests,
    OperationState,
    PauseMode,
    ResourceKind,
)
from app.http.moments import Moment
from app.operations.registering import EngineChange, EngineDraft
from app.operations.settling import Statement

BIGGEST = 2**53 - 1  # what every JSON reader can tell apart

# No control characters but a line's end and a tab: they have no place in a log or a terminal,
# and one of them (NUL) not in every database either.
_WORDS = r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*$"
_PLAIN = r"^[\x21-\x7e]+$"

Words = Annotated[str, StringConstraints(max_length=500, pattern=_WORDS)]
SaidWords = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=500,
        pattern=r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*[^\s\x00-\x1f\x7f-\x9f][^\x00-\x08\x0b-\x1f\x7f-\x9f]*$",
    ),
]
ENGINE_ID = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
EngineId = Annotated[str, StringConstraints(pattern=ENGINE_ID)]
Address = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=_PLAIN)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=_PLAIN)]
LabelKey = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$")
]
LabelValue = Annotated[str, StringConstraints(pattern=r"^[\x20-\x7e]{0,63}$")]
Count = Annotated[int, Field(ge=0, le=BIGGEST)]
Rank = Annotated[int, Field(ge=0, le=65535)]


def sequence(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class OrderBody(Body):
    """What every order may say beside itself."""

    model: Name | None = Field(
        None, description="Where an engine serves several: the one it is for. Absent: all of it."
    )
    expected_revision: Count | None = Field(
        None, description="Refused with 409 unless this is the engine's revision."
    )
    reason: Words | None = Field(None, description="Your own words, kept with the operation.")
    deadline_ms: Annotated[int, Field(ge=1, le=BIGGEST)] | None = Field(
        None, description="Nothing is sent later than this after acceptance."
    )
    dry_run: bool = Field(False, description="Check everything, send nothing, answer a plan.")
    when_busy: Literal["refuse", "queue"] = Field(
        "refuse",
        description="While another exclusive operation is open on the engine: refuse this one, or "
        "queue it behind those that wait. Without effect on profiles and aborts.",
    )
    override_freeze: bool = Field(
        False, description="Order it in a freeze too. Takes `admin:engines` as well."
    )

    def command(self) -> Command:
        """The order as the domain knows it. Raises InvalidArgument."""
        raise NotImplementedError


class FlushCachesBody(OrderBody):
    caches: Annotated[
        tuple[Annotated[CacheKind, Field(strict=False)], ...],
        Field(min_length=1, max_length=8, json_schema_extra={"uniqueItems": True}),
        BeforeValidator(sequence),
    ]

    def command(self) -> Command:
        return FlushCaches(model=self.model, caches=self.caches)


class PauseBody(OrderBody):
    mode: Annotated[PauseMode, Field(strict=False)] = Field(
        description="drain: finish what runs. abort: end it. keep: freeze it until resumed."
    )
    new_requests: Annotated[NewRequests, Field(strict=False)] = Field(
        NewRequests.HOLD, description="What happens to requests that come during the pause."
    )
    hold_limit_ms: Annotated[int, Field(ge=1, le=BIGGEST)] | None = Field(
        None, description="How long one is held; absent: the engine's default."
    )

    def command(self) -> Command:
        return Pause(
            model=self.model,
            mode=self.mode,
            new_requests=self.new_requests,
            hold_limit_ms=self.hold_limit_ms,
        )


class ResumeBody(OrderBody):
    pause_epoch: Annotated[int, Field(ge=1, le=BIGGEST)] = Field(
        description="The pause to lift: `pause_epoch` of its result, or `facts.pause.epoch`."
    )

    def command(self) -> Command:
        return Resume(model=self.model, pause_epoch=self.pause_epoch)


Resources = Annotated[
    tuple[Annotated[ResourceKind, Field(strict=False)], ...],
    Field(min_length=1, max_length=8, json_schema_extra={"uniqueItems": True}),
    BeforeValidator(sequence),
]


class ReleaseResourcesBody(OrderBody):
    resources: Resources
    content: Annotated[ContentPolicy, Field(strict=False)] = Field(
        description="preserve: kept in host memory. discard: gone; of weights, until an update."
    )
    drain: Annotated[DrainRule, Field(strict=False)] = Field(
        description="Requests that run: wait for them, abort them, or refuse because of them."
    )

    def command(self) -> Command:
        return ReleaseResources(
            model=self.model, resources=self.resources, content=self.content, drain=self.drain
        )


class RestoreResourcesBody(OrderBody):
    resources: Resources
    release_epoch: Annotated[int, Field(ge=1, le=BIGGEST)] = Field(
        description="The latest release: `release_epoch` of its result, or `facts.release_epoch`."
    )

    def command(self) -> Command:
        return RestoreResources(
            model=self.model, resources=self.resources, release_epoch=self.release_epoch
        )


class AbortRequestsBody(OrderBody):
    """Either `request_ids` or `"all": true`."""

    request_ids: Annotated[tuple[Name, ...], Field(max_length=1000), BeforeValidator(sequence)] = ()
    all: bool = False

    def command(self) -> Command:
        return AbortRequests(model=self.model, request_ids=self.request_ids, all=self.all)


class ShutdownBody(OrderBody):
    def command(self) -> Command:
        return Shutdown(model=self.model)


class CancelBody(Body):
    reason: Words | None = None


class SettleBody(Body):
    """What a person states of an operation whose outcome is not known."""

    outcome: Literal["succeeded", "failed", "cancelled"]
    reason: SaidWords = Field(description="How you know; kept with the event and in the audit.")
    message: Words = Field("", description="What a failure says of itself; else the reason.")

    def statement(self) -> Statement:
        return Statement(end=OperationState(self.outcome), reason=self.reason, message=self.message)


class FreezeBody(Body):
    reason: SaidWords = Field(description="Told to everybody whose order is refused.")
    until: Moment = Field(
        description="RFC 3339 with an offset; in the future, 31 days ahead at most."
    )


class MemberBody(Body):
    """Addresses are `host:port` or `unix:/path`, within the gateway's `engine_reach`."""

    rank: Rank = 0
    admin: Address = Field(description="Where orders go.")
    control: Address = Field(description="Where the engine is read.")

    def member(self) -> Member:
        return Member(self.rank, self.admin, self.control)


class TlsBody(Body):
    """`credential` names an entry of the gateway's settings; secrets are never sent here."""

    server_name: Name | None = None
    credential: Name | None = None

    def names(self) -> TlsNames:
        return TlsNames(self.server_name, self.credential)


Members = Annotated[
    tuple[MemberBody, ...], Field(min_length=1, max_length=1024), BeforeValidator(sequence)
]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32)]
_SHARED = "Also where another engine is registered at one of the addresses (else 409)."


class RegisterEngineBody(Body):
    id: EngineId
    dialect: Annotated[Dialect, Field(strict=False)] = Dialect.OPENENGINE
    members: Members
    tls: TlsBody = TlsBody()
    labels: Labels = Field(default_factory=dict)
    reason: Words | None = None
    allow_shared_address: bool = Field(False, description=_SHARED)

    def draft(self) -> EngineDraft:
        return EngineDraft(
            id=self.id,
            dialect=self.dialect,
            members=tuple(member.member() for member in self.members),
            tls=self.tls.names(),
            labels=dict(self.labels),
        )


class ChangeEngineBody(Body):
    """What is absent stays; what is there replaces the whole of what was."""

    members: Members | None = None
    tls: TlsBody | None = None
    labels: Labels | None = None
    reason: Words | None = None
    allow_shared_address: bool = Field(False, description=_SHARED)

    def change(self) -> EngineChange:
        return EngineChange(
            members=None if self.members is None else tuple(m.member() for m in self.members),
            tls=None if self.tls is None else self.tls.names(),
            labels=None if self.labels is None else dict(self.labels),
        )
