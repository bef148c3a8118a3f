"""A registered engine: how to reach it, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from app.domain.capabilities import Capabilities
from app.domain.facts import EngineFacts
from app.domain.freezes import Freeze
from app.domain.operation import JsonObject


class Dialect(StrEnum):
    OPENENGINE = "openengine"
    VLLM = "vllm"


class HealthState(StrEnum):
    SERVING = "serving"
    DEGRADED = "degraded"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Member:
    """Addresses are `host:port` or `unix:/path`. `admin` takes orders, `control` is read."""

    rank: int
    admin: str
    control: str


@dataclass(frozen=True, slots=True)
class TlsNames:
    """`server_name`: what the engine's certificate must say. `credential`: a named reference into
    the gateway's settings; secrets never travel through the API."""

    server_name: str | None = None
    credential: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """`generation` counts changes of the registration, apart from the engine's revision."""

    id: str
    dialect: Dialect
    members: tuple[Member, ...]
    tls: TlsNames = TlsNames()
    labels: Mapping[str, str] = field(default_factory=dict)
    generation: int = 1
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The last reading. `facts` None: never reached. `observed_at`: the last try, UTC."""

    health: HealthState = HealthState.UNKNOWN
    observed_at: datetime | None = None
    facts: EngineFacts | None = None
    capabilities: Capabilities | None = None
    info: JsonObject = field(default_factory=dict)
    models: tuple[JsonObject, ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    registration: Registration
    observed: Observed = Observed()
    running_operation: str | None = None  # the open exclusive one
    freeze: Freeze | None = None  # the one in force

    @property
    def id(self) -> str:
        return self.registration.id
