"""What there is to say of a reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """`title` stays the same for all problems of the reason. `todo`: what a caller can do."""

    title: str
    meaning: str
    todo: str
