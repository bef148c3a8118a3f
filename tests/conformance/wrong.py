"""What an engine that is wrong on purpose is, and which cases have to catch it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.conformance.placing import Way
from tests.conformance.faulty import Fault
from tests.conformance.paced_engine import PacedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongServer:
    """`caught_by`: each of these cases has to fail. `patience_s`: of the suite, where the fault is
    that something does not come."""

    caught_by: tuple[str, ...]
    fault: type[Fault] = Fault
    engine: type[PacedEngine] = PacedEngine
    patience_s: float = 20.0
    token: str | None = None

    @property
    def name(self) -> str:
        return self.engine.__name__ if self.fault is Fault else self.fault.__name__


def wrong(fault: type[Fault], *caught_by: str, **more: Any) -> WrongServer:
    return WrongServer(caught_by=caught_by, fault=fault, **more)


def broken(engine: type[PacedEngine], *caught_by: str, **more: Any) -> WrongServer:
    return WrongServer(caught_by=caught_by, engine=engine, **more)


def of_each_way(damage: str) -> tuple[str, ...]:
    return tuple(f"update.{way.value}-{damage}" for way in Way)


SOON = 2.0
