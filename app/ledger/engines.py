"""The register of engines, and the last reading of each."""

from __future__ import annotations

from app.domain.engine import Engine, Observed, Registration
from app.ledger.values import AuditEntry, EngineFilter, Page


class Engines:
    """Ids are never used again: a removed engine stays in the register, unseen."""

    async def register(self, registration: Registration, audit: AuditEntry) -> Engine:
        """Raises EngineExists, also for the id of a removed engine."""
        raise NotImplementedError

    async def get(self, engine_id: str) -> Engine | None:
        """None: never registered, or removed."""
        raise NotImplementedError

    async def page(
        self, wanted: EngineFilter, after: str | None = None, size: int = 50
    ) -> Page[Engine]:
        """By id ascending, those behind `after`; `next` is the last id of the page."""
        raise NotImplementedError

    async def change(
        self, registration: Registration, expected_generation: int, audit: AuditEntry
    ) -> Engine:
        """Replace dialect, members, TLS names and labels. The new generation is the expected
        one plus 1, whatever `registration` says; `created_at` stays.

        Raises GenerationMismatch or UnknownEngine.
        """
        raise NotImplementedError

    async def remove(self, engine_id: str, expected_generation: int, audit: AuditEntry) -> None:
        """Raises UnknownEngine, GenerationMismatch, or EngineHasOpenOperation naming it."""
        raise NotImplementedError

    async def observe(self, engine_id: str, observed: Observed) -> None:
        """Keep a reading, unless one of a later `observed_at` is kept already.

        Raises UnknownEngine for one that was never registered.
        """
        raise NotImplementedError
