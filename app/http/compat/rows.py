"""What a table of endpoints consists of. Each layer has one; what its rows do is done by the same
works."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Scope as AsgiScope

from app.domain.errors import ChadburnError
from app.domain.scopes import Scope
from app.http.compat.asked import Asked
from app.http.compat.backing import Backed
from app.http.compat.exposures import Flavour
from app.http.compat.giving import CompatCall
from app.http.compat.refusals import NeverOffered

Shape = Callable[[ChadburnError, AsgiScope], Response]
"""How one endpoint refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`backed`: whether the engine's capabilities are enough for there to be such an endpoint.
    `failing`: what its refusals look like, in a word that the layer's shapes know."""

    path: str
    methods: tuple[str, ...] = ("POST",)
    scopes: tuple[Scope, ...]
    backed: Backed
    read: Callable[[Asked], Any]
    act: Callable[[CompatCall, Any], Awaitable[Any]]
    say: Callable[[Any], Response]
    failing: str | None = None

    async def answer(self, call: CompatCall) -> Response:
        return self.say(await self.act(call, self.read(call.asked)))


@dataclass(frozen=True, slots=True)
class Table:
    """`shape`: of a flavour, and of what a row has as `failing`."""

    rows: tuple[Row, ...]
    shape: Callable[[Flavour, str | None], Shape]


def nothing(_: Asked) -> None:
    """What the engine does not look at is not looked at here either."""


def refuse(why: str | None = None) -> Callable[[CompatCall, None], Awaitable[None]]:
    """Whoever calls is told so, once it is known who that is."""

    async def act(_call: CompatCall, _asked: None) -> None:
        raise NeverOffered(why)

    return act
