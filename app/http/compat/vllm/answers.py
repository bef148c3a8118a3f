"""What endpoints say when all went well: bodies that vLLM alone has."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from app.http.compat.vllm.pauses import Woken
from app.http.compat.works import Aborted


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
