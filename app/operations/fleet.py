"""The engines: registered, read, and watched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from app.backends.port import Discovery, EngineBackend
from app.backends.reach import ReachPolicy
from app.backends.registry import Backends
from app.clock import Clock
from app.domain.engine import Dialect, Engine, Member, TlsNames
from app.domain.operation import JsonObject
from app.ledger.ledger import Ledger
from app.operations.callers import Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDraft:
    """What a registration is asked to be."""

    id: str
    dialect: Dialect
    members: tuple[Member, ...]
    tls: TlsNames = TlsNames()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChange:
    """None: stays as it is."""

    members: tuple[Member, ...] | None = None
    tls: TlsNames | None = None
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class LoadSample:
    """`load`: as `EngineBackend.load` gives it. `at` is UTC."""

    at: datetime
    load: JsonObject


class Fleet:
    def __init__(
        self,
        ledger: Ledger,
        backends: Backends,
        reach: ReachPolicy,
        clock: Clock,
        *,
        observe_interval_s: float = 5.0,
    ) -> None: ...

    async def start(self) -> None:
        """Begin to watch every registered engine."""

    async def stop(self) -> None:
        """End the watching and give back the connections. May be called twice."""

    async def register(self, draft: EngineDraft, caller: Caller) -> Engine:
        """Raises InvalidArgument (id, members, address out of reach, unknown credential),
        Unimplemented (dialect), EngineExists."""
        raise NotImplementedError

    async def change(
        self, engine_id: str, change: EngineChange, expected_generation: int, caller: Caller
    ) -> Engine:
        """Raises UnknownEngine, GenerationMismatch, and InvalidArgument as `register`."""
        raise NotImplementedError

    async def remove(self, engine_id: str, expected_generation: int, caller: Caller) -> None:
        """Raises UnknownEngine, GenerationMismatch, EngineHasOpenOperation."""
        raise NotImplementedError

    async def engine(self, engine_id: str) -> Engine:
        """As last known, without a call to the engine. Raises UnknownEngine."""
        raise NotImplementedError

    async def fresh(self, engine_id: str) -> Engine:
        """Facts older than 2 s are read again first, for 300 ms at most; else as known.

        Raises UnknownEngine, and nothing about the engine: that shows in its health.
        """
        raise NotImplementedError

    async def reread(self, engine_id: str, timeout_s: float) -> Engine:
        """Read the engine now whatever the age of the facts; as known if it does not answer."""
        raise NotImplementedError

    async def discover(self, engine_id: str) -> Discovery:
        """A round trip. Raises UnknownEngine, EngineUnreachable, EngineFault."""
        raise NotImplementedError

    async def load(self, engine_id: str) -> JsonObject:
        """A round trip. Raises UnknownEngine, EngineUnreachable, EngineFault."""
        raise NotImplementedError

    async def load_history(self, engine_id: str, since: datetime) -> tuple[LoadSample, ...]:
        """What this process saw in the last hour, oldest first. Raises UnknownEngine."""
        raise NotImplementedError

    async def backend(self, engine_id: str) -> EngineBackend:
        """The way to the engine as it is registered now. Raises UnknownEngine."""
        raise NotImplementedError
