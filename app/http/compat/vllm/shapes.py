"""Refusals as vLLM words them: its shapes and statuses, with texts of our own.

Three shapes are in use there. Most endpoints answer with an object that says message, type, param
and code; those for pauses and aborts with `{"error": "text"}`; the older release with
`{"detail": "text"}` where an endpoint itself turned a request down. Nothing of the input is echoed.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Scope as AsgiScope

from app.auth.tokens.errors import PermissionDenied, TokenRefused
from app.domain.errors import (
    ChadburnError,
    EngineBusy,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    UnsupportedOperation,
)
from app.http.compat.exposures import Flavour
from app.http.compat.refusals import BadInput, Invalid, NeverOffered, OrderFailed
from app.http.problems import headers_of, status_of
from app.http.refusals import MethodRefused

_TYPES = {
    400: "Bad Request",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "Conflict",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
# Of an operation that has failed; all else is the engine's failure.
_STATUS_OF_CODE = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 409,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
}
_OURS = (FailedPrecondition, InvalidArgument, NotFound, UnsupportedOperation)


class Shape:
    """How one endpoint refuses. `failing`: the words before the reason, for those that answer with
    one text; None: those with an object."""

    def __init__(self, flavour: Flavour, failing: str | None) -> None:
        self._flavour = flavour
        self._failing = failing

    def __call__(self, error: ChadburnError, scope: AsgiScope) -> Response:
        status = _status(error)
        return JSONResponse(self._body(error, status), status, headers_of(error, status, scope))

    def _body(self, error: ChadburnError, status: int) -> dict[str, Any]:
        if isinstance(error, MethodRefused):
            return {"detail": "Method Not Allowed"}
        if isinstance(error, TokenRefused):
            return {"error": error.message}
        if isinstance(error, Invalid):
            parts = {"type": error.kind, "loc": error.place, "msg": error.message}
            told = f"1 validation error:\n  {parts if error.place else error.message}"
            return _object(told, "Bad Request", status, error.place or None)
        if self._failing is not None and not isinstance(error, PermissionDenied | InvalidArgument):
            return {"error": f"{self._failing}: {error.message}"}
        if isinstance(error, BadInput):
            return _object(error.message, "InvalidUserInput", status)
        if self._flavour is Flavour.V0_26 and isinstance(error, _OURS):
            return {"detail": error.message}
        return _object(error.message, _TYPES.get(status, "InternalServerError"), status)


def _status(error: ChadburnError) -> int:
    if isinstance(error, NeverOffered):
        return 403
    if isinstance(error, OrderFailed):
        code = "ABORTED" if error.error is None else error.error.code
        return _STATUS_OF_CODE.get(code, 500)
    if isinstance(error, EngineBusy):
        return 503  # over soon, and 5xx is what clients try again on
    status, _ = status_of(error)
    # A body that does not fit is 400 there, and a failing engine 500.
    return {422: 400, 502: 500}.get(status, status)


def _object(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
