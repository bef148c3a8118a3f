"""Refusals as SGLang words them: its shapes and statuses, with texts of our own.

Nearly all are 400 there, whether the call was wrong, came at a wrong time, or the engine failed at
it; so they are here. What tells more has a status of its own: 401 and 403, 429, 503 for what is
over soon (an order that runs, an engine out of reach), 504 where nobody knows how it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Scope as AsgiScope

from app.auth.tokens.errors import PermissionDenied, TokenRefused
from app.domain.errors import ChadburnError, EngineBusy
from app.http.compat.exposures import Flavour
from app.http.compat.refusals import Invalid, NeverOffered, OrderFailed
from app.http.problems import headers_of, status_of
from app.http.refusals import MethodRefused

_OWN = frozenset({401, 403, 405, 413, 415, 429, 503, 504})


class Style(StrEnum):
    """What a refusal by an endpoint looks like; ERROR where it has none of its own."""

    ERROR = "error"
    SUCCESS = "success"
    CHECKPOINT = "checkpoint"
    ADAPTER = "adapter"
    ROLE = "role"
    FLAT = "flat"
    TEXT = "text"


_BODIES: Mapping[Style, Callable[[str], dict[str, Any]]] = {
    Style.ERROR: lambda said: {"error": {"message": said}},
    Style.SUCCESS: lambda said: {"success": False, "message": said},
    Style.CHECKPOINT: lambda said: {
        "success": False,
        "message": said,
        "num_paused_requests": 0,
    },
    Style.ADAPTER: lambda said: {
        "rid": None,
        "http_worker_ipc": None,
        "success": False,
        "error_message": said,
        "loaded_adapters": None,
    },
    Style.ROLE: lambda said: {
        "rid": None,
        "http_worker_ipc": None,
        "success": False,
        "message": said,
        "old_role": None,
        "new_role": None,
        "safe_to_restore": True,
    },
    Style.FLAT: lambda said: {"error": said},
}


def shape_of(
    _flavour: Flavour, style: str | None
) -> Callable[[ChadburnError, AsgiScope], Response]:
    chosen = Style.ERROR if style is None else Style(style)

    def shape(error: ChadburnError, scope: AsgiScope) -> Response:
        status = _status(error)
        headers = headers_of(error, status, scope)
        if chosen is Style.TEXT and not _by_itself(error):
            return Response(f"{error.message}\n", status, headers)
        return JSONResponse(_body(error, status, chosen), status, headers)

    return shape


def _by_itself(error: ChadburnError) -> bool:
    """Told alike at every endpoint."""
    return isinstance(
        error, Invalid | MethodRefused | TokenRefused | PermissionDenied | NeverOffered
    )


def _body(error: ChadburnError, status: int, style: Style) -> dict[str, Any]:
    if isinstance(error, MethodRefused):
        return {"detail": "Method Not Allowed"}
    if isinstance(error, TokenRefused | PermissionDenied | NeverOffered):
        return {"error": error.message}
    if isinstance(error, Invalid):
        parts = {"type": error.kind, "loc": tuple(error.place.split(".")), "msg": error.message}
        return {
            "object": "error",
            "message": f"1 validation error:\n  {parts}",
            "type": "Bad Request",
            "param": None,
            "code": status,
        }
    return _BODIES[style](error.message)


def _status(error: ChadburnError) -> int:
    if isinstance(error, NeverOffered):
        return 403
    if isinstance(error, EngineBusy):
        return 503
    if isinstance(error, OrderFailed):
        reason = None if error.error is None else error.error.reason
        return 503 if reason == "ENGINE_UNREACHABLE" else 400
    status, _ = status_of(error)
    return status if status in _OWN else 400
