"""What can be wrong with a request as HTTP, before any use case is asked."""

from __future__ import annotations

from math import ceil
from typing import ClassVar

from app.domain.errors import (
    ChadburnError,
    DeadlineExceeded,
    FailedPrecondition,
    FieldFault,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)


class EdgeRefusal(ChadburnError):
    """Mixed into a branch of the domain's errors; `status` overrules the branch's status."""

    status: ClassVar[int]
    headers: ClassVar[dict[str, str]] = {}


class MalformedRequest(EdgeRefusal, InvalidArgument):
    reason = "MALFORMED_REQUEST"
    status = 400


class MalformedJson(EdgeRefusal, InvalidArgument):
    reason = "MALFORMED_JSON"
    status = 400


class MalformedPrecondition(EdgeRefusal, InvalidArgument):
    reason = "MALFORMED_PRECONDITION"
    status = 400


class PageTokenInvalid(EdgeRefusal, InvalidArgument):
    reason = "PAGE_TOKEN_INVALID"
    status = 400


class TokenInQuery(EdgeRefusal, InvalidArgument):
    """A query string ends in logs and histories, so a token in one is spent."""

    reason = "TOKEN_IN_QUERY"
    status = 400

    def __init__(self) -> None:
        super().__init__(
            "Tokens are taken from the Authorization header alone. Treat the one in the URL as "
            "disclosed."
        )


class SchemaViolation(EdgeRefusal, InvalidArgument):
    reason = "SCHEMA_VIOLATION"
    status = 422


class ReasonMissing(EdgeRefusal, InvalidArgument):
    """The policy demands the caller's own words for orders of this kind."""

    reason = "REASON_REQUIRED"
    status = 422

    def __init__(self) -> None:
        detail = "The gateway's policy demands a reason for this order."
        super().__init__(detail, faults=(FieldFault("/reason", detail),))


class NotThere(EdgeRefusal, NotFound):
    reason = "ROUTE_NOT_FOUND"
    status = 404

    def __init__(self) -> None:
        super().__init__("There is nothing at this path.")


class MethodRefused(EdgeRefusal, InvalidArgument):
    reason = "METHOD_NOT_ALLOWED"
    status = 405

    def __init__(self, allowed: str) -> None:
        super().__init__(f"Allowed here: {allowed}.")
        self.allowed = allowed


class NothingAcceptable(EdgeRefusal, InvalidArgument):
    reason = "NOT_ACCEPTABLE"
    status = 406

    def __init__(self, offered: tuple[str, ...]) -> None:
        super().__init__(f"Offered here: {', '.join(offered)}.")


class PreconditionFailed(EdgeRefusal, FailedPrecondition):
    """If-Match names something that cannot be the present state."""

    reason = "PRECONDITION_FAILED"
    status = 412


class BodyTooLarge(EdgeRefusal, InvalidArgument):
    reason = "BODY_TOO_LARGE"
    status = 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"A body may have {limit_bytes} bytes.")


class HeadTooLarge(EdgeRefusal, InvalidArgument):
    reason = "HEAD_TOO_LARGE"
    status = 431

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"Request line and headers may have {limit_bytes} bytes.")


class TooManyHeaders(EdgeRefusal, InvalidArgument):
    reason = "HEAD_TOO_LARGE"
    status = 431

    def __init__(self, limit: int) -> None:
        super().__init__(f"A request may have {limit} headers.")


class HeadTooSlow(EdgeRefusal, InvalidArgument):
    reason = "REQUEST_TOO_SLOW"
    status = 408
    retryable = True

    def __init__(self) -> None:
        super().__init__("The request's headers did not arrive in time.")


class BodyTooSlow(EdgeRefusal, InvalidArgument):
    reason = "REQUEST_TOO_SLOW"
    status = 408
    retryable = True

    def __init__(self) -> None:
        super().__init__("The request's body did not arrive in time.")


class MediaTypeRefused(EdgeRefusal, InvalidArgument):
    reason = "UNSUPPORTED_MEDIA_TYPE"
    status = 415

    def __init__(self) -> None:
        super().__init__("A body must be application/json.")


class HostRefused(EdgeRefusal, InvalidArgument):
    """The Host header names another service: a rebound name, or a proxy set up wrongly."""

    reason = "HOST_NOT_ALLOWED"
    status = 421

    def __init__(self) -> None:
        super().__init__("This service does not answer to that host name.")


class PreconditionMissing(EdgeRefusal, FailedPrecondition):
    reason = "PRECONDITION_MISSING"
    status = 428

    def __init__(self) -> None:
        super().__init__('Send If-Match with the generation you have read, such as "g3".')


class TooManyStreams(EdgeRefusal, ResourceExhausted):
    reason = "TOO_MANY_STREAMS"
    status = 429

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=5)


class RateLimited(EdgeRefusal, ResourceExhausted):
    """Too often, by one caller or from one address."""

    status = 429


class TooManyRefusals(RateLimited):
    reason = "TOO_MANY_REFUSALS"

    def __init__(self, wait_s: float) -> None:
        super().__init__("Too many calls of yours were refused.", retry_after_s=ceil(wait_s))


class TooManyNewTokens(RateLimited):
    reason = "TOO_MANY_NEW_TOKENS"
    retryable = True

    def __init__(self, wait_s: float) -> None:
        message = "Too many tokens that were not seen before, or logins, come from your address."
        super().__init__(message, retry_after_s=ceil(wait_s))


class TooManyChanges(RateLimited):
    reason = "TOO_MANY_CHANGES"
    retryable = True

    def __init__(self, wait_s: float) -> None:
        message = "Orders and changes come too fast from you, or from your address."
        super().__init__(message, retry_after_s=ceil(wait_s))


class Overloaded(EdgeRefusal, Unavailable):
    reason = "OVERLOADED"
    status = 503

    def __init__(self, message: str = "As many requests are under way as may be.") -> None:
        super().__init__(message, retry_after_s=1)


class AnswerTimedOut(EdgeRefusal, DeadlineExceeded):
    """What was begun goes on to its end; only nobody waits for it any more."""

    reason = "ANSWER_TIMED_OUT"
    status = 504

    def __init__(self) -> None:
        super().__init__("The gateway could not answer in time.")


class Closing(EdgeRefusal, Unavailable):
    reason = "SHUTTING_DOWN"
    status = 503

    def __init__(self) -> None:
        super().__init__("This gateway is shutting down.", retry_after_s=2)
