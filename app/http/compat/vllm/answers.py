"""What endpoints say when all went well: bodies as of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse, Response

from app.http.compat.vllm.pauses import Woken
from app.http.compat.works import Aborted


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


def aborted(found: Aborted) -> Response:
    unsure = {"unverified": found.unverified} if found.unverified else {}
    return JSONResponse({"status": "aborted", "aborted": found.requests, **unsure})


def sleeping(level: int) -> Response:
    return JSONResponse({"status": "sleeping", "level": level})


def woken(woken: Woken) -> Response:
    status = "awake" if woken.awake else "sleeping"
    tags = None if woken.tags is None else list(woken.tags)
    return JSONResponse({"status": status, "tags": tags})


def versioned(version: str) -> Response:
    return JSONResponse({"success": True, "new_version": version})


def scaled(size: int) -> Response:
    return JSONResponse({"message": f"Scaled to {size} data parallel engines"})
