"""Callers who wait for the end of an operation, which may take long and takes nothing meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, cast

from starlette.requests import Request

from app.http.negotiation import Preference


class Place(Protocol):
    """One request's place among those that are under way."""

    def free(self) -> None: ...


@dataclass(slots=True)
class Waiting:
    """`most` at once. Who finds no room is answered at once, as without the preference: that is no
    error, and the operation can be asked for again."""

    most: int = 128
    count: int = 0

    def honoured(self, preference: Preference) -> Preference:
        if preference.wait_s and self.count >= self.most:
            return replace(preference, wait_s=0, applied=None)
        return preference

    @contextmanager
    def one_more(self, request: Request) -> Iterator[None]:
        """For the time of the block. The request leaves its place to those that are worked on."""
        place = cast("Place | None", getattr(request.state, "place", None))
        if place is not None:
            place.free()
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
