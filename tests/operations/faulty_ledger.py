"""A real ledger whose connection fails as drawn: before a write, or after it was committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from app.ledger import Ledger
from app.ledger.errors import LedgerUnavailable

Fault = Literal["fine", "before", "after"]
FAULTS: tuple[Fault, ...] = Fault.__args__  # type: ignore[attr-defined]


class FaultyLedger:
    """`faults[name]` is used up by calls of that name (`record`, `renew`, …) from its front."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.faults: dict[str, list[Fault]] = {}
        self.failed = 0
        self.engines = _Faulty(self, ledger.engines)
        self.operations = _Faulty(self, ledger.operations)
        self.audit = _Faulty(self, ledger.audit)
        self.leases = _Faulty(self, ledger.leases)
        self.events = ledger.events

    def take(self, name: str) -> Fault:
        waiting = self.faults.get(name)
        fault: Fault = waiting.pop(0) if waiting else "fine"
        self.failed += fault != "fine"
        return fault


class _Faulty:
    def __init__(self, ledger: FaultyLedger, inner: Any) -> None:
        self._ledger = ledger
        self._inner = inner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **more: Any) -> Any:
            fault = self._ledger.take(name)
            if fault == "before":
                raise LedgerUnavailable("the database is away")
            result = await getattr(self._inner, name)(*args, **more)
            if fault == "after":
                raise LedgerUnavailable("the connection broke at the commit")
            return result

        return call
