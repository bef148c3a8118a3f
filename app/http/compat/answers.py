"""What endpoints say when all went well, in forms that several engines have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse, Response


def said(**told: Any) -> Callable[[Any], Response]:
    return lambda _: JSONResponse(told)


def told(name: str) -> Callable[[Any], Response]:
    return lambda value: JSONResponse({name: value})


def empty(_: Any) -> Response:
    return Response()


def well(well: bool) -> Response:
    return Response(status_code=200 if well else 503)


def text(said: str) -> Response:
    return Response(said)  # without a media type, as there
