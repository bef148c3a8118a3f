"""The one place where what went wrong becomes a status and a problem document (RFC 9457).

Nothing of the request's content and no foreign message goes in: `detail` is a sentence of our
own, places in `errors` are names that the schema knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Scope as AsgiScope

from app.auth.tokens.errors import (
    InsufficientScope,
    NonceNeeded,
    PermissionDenied,
    ProofRefused,
    TokenInvalid,
    TokenMissing,
    TokenRefused,
)
from app.domain import errors as domain
from app.http.reasons import describe, slug_of
from app.http.refusals import EdgeRefusal, MethodRefused
from app.observability.tracing import current_ids

MEDIA_TYPE = "application/problem+json"

# Branch of the tree: (status, google.rpc.Code). The first that an error is an instance of.
_BRANCHES: tuple[tuple[type[domain.ChadburnError], int, str], ...] = (
    (TokenRefused, 401, "UNAUTHENTICATED"),
    (PermissionDenied, 403, "PERMISSION_DENIED"),
    (domain.GenerationMismatch, 412, "ABORTED"),
    (domain.InvalidArgument, 400, "INVALID_ARGUMENT"),
    (domain.NotFound, 404, "NOT_FOUND"),
    (domain.AlreadyExists, 409, "ALREADY_EXISTS"),
    (domain.Aborted, 409, "ABORTED"),
    (domain.FailedPrecondition, 409, "FAILED_PRECONDITION"),
    (domain.ResourceExhausted, 429, "RESOURCE_EXHAUSTED"),
    (domain.Unimplemented, 501, "UNIMPLEMENTED"),
    (domain.Unavailable, 503, "UNAVAILABLE"),
    (domain.DeadlineExceeded, 504, "DEADLINE_EXCEEDED"),
    # Our credential or the engine's reply is at fault, never the caller's token: a 401 would
    # send the caller to log in again.
    (domain.EngineFault, 502, "INTERNAL"),
)

_RETRY_AFTER_S = {429: 5, 503: 5}


def usual_status(kind: type[domain.ChadburnError]) -> tuple[int, str]:
    """The status and google.rpc.Code of errors of a kind."""
    status, code = next(
        ((status, code) for branch, status, code in _BRANCHES if issubclass(kind, branch)),
        (500, "INTERNAL"),
    )
    return kind.status if issubclass(kind, EdgeRefusal) else status, code


def status_of(error: domain.ChadburnError) -> tuple[int, str]:
    """The status and google.rpc.Code of an error."""
    status, code = usual_status(type(error))
    if isinstance(error, EdgeRefusal):
        return status, code
    if isinstance(error, domain.InvalidArgument) and error.faults:
        return 422, code
    if isinstance(error, domain.RevisionMismatch) and error.from_header:
        return 412, code
    return status, code


def problem_of(
    error: domain.ChadburnError,
    scope: AsgiScope,
    *,
    errors: Sequence[Mapping[str, str]] = (),
) -> Response:
    """The whole answer, with the headers that belong to it. `errors` adds to the error's own."""
    status, code = status_of(error)
    places = [{"pointer": fault.pointer, "detail": fault.detail} for fault in error.faults]
    return problem(
        status=status,
        code=code,
        reason=error.reason,
        detail=error.message,
        retryable=error.retryable,
        operation=error.operation_id,
        errors=[*places, *errors],
        headers=headers_of(error, status, scope),
    )


def unexpected(scope: AsgiScope) -> Response:
    """The answer for a defect of ours. Says nothing about it: the log does."""
    del scope
    return problem(
        status=500,
        code="INTERNAL",
        reason="INTERNAL",
        detail="The gateway failed to answer; the request id names it in its logs.",
        retryable=False,
    )


def problem(
    *,
    status: int,
    code: str,
    reason: str,
    detail: str,
    retryable: bool,
    operation: str | None = None,
    errors: Sequence[Mapping[str, str]] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    ids = current_ids()
    body: dict[str, Any] = {
        "type": f"/problems/{slug_of(reason)}",
        "title": describe(reason).title,
        "status": status,
        "detail": detail,
        "instance": f"urn:uuid:{ids.request_id}" if ids else None,
        "code": code,
        "reason": reason,
        "request_id": ids.request_id if ids else None,
        "trace_id": ids.trace_id if ids else None,
        "retryable": retryable,
        "errors": [dict(place) for place in errors],
        "operation": operation,
    }
    return JSONResponse(body, status, dict(headers or {}), MEDIA_TYPE)


def headers_of(error: domain.ChadburnError, status: int, scope: AsgiScope) -> dict[str, str]:
    """Those that belong to a refusal, whatever its body is like."""
    headers: dict[str, str] = {}
    wait_s = error.retry_after_s or _RETRY_AFTER_S.get(status)
    if wait_s is not None:
        headers["Retry-After"] = str(math.ceil(wait_s))
    if isinstance(error, MethodRefused):
        headers["Allow"] = error.allowed
    if isinstance(error, TokenRefused | InsufficientScope):
        headers["WWW-Authenticate"] = challenge(error, scope)
    if isinstance(error, NonceNeeded):
        headers["DPoP-Nonce"] = error.nonce
    if error.operation_id is not None:
        headers["Link"] = f'</v1/operations/{error.operation_id}>; rel="related"'
    return headers


def challenge(error: domain.ChadburnError, scope: AsgiScope) -> str:
    """RFC 6750 section 3, with the pointer to our metadata of RFC 9728 section 5.1. Where bound
    tokens are taken a challenge of RFC 9449 section 7.1 stands beside it."""
    rooms = scope.get("state", {}).get("rooms")
    algorithms = " ".join(rooms.edge.proof_algorithms) if rooms is not None else ""
    parts = ['realm="chadburn"']
    if isinstance(error, InsufficientScope):
        parts.append('error="insufficient_scope"')
        if error.required:
            parts.append(f'scope="{" ".join(error.required)}"')
    elif isinstance(error, NonceNeeded):
        parts.append('error="use_dpop_nonce"')
    elif isinstance(error, ProofRefused):
        parts.append('error="invalid_dpop_proof"')
    elif isinstance(error, TokenInvalid):
        parts.append('error="invalid_token"')
    elif not isinstance(error, TokenMissing):
        parts.append('error="invalid_request"')
    metadata = scope.get("state", {}).get("resource_metadata")
    if metadata:
        parts.append(f'resource_metadata="{metadata}"')
    if isinstance(error, ProofRefused):
        return f'DPoP {", ".join(parts)}, algs="{algorithms}"'
    bearer = f"Bearer {', '.join(parts)}"
    return f'{bearer}, DPoP algs="{algorithms}"' if algorithms else bearer
