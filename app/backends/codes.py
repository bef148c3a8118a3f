"""By which code an error of the domain is told in the end of an operation. Pure."""

from __future__ import annotations

from app.domain import errors as domain

# Branch of the tree: google.rpc.Code. The first that an error is an instance of.
_CODES: tuple[tuple[type[domain.ChadburnError], str], ...] = (
    (domain.InvalidArgument, "INVALID_ARGUMENT"),
    (domain.NotFound, "NOT_FOUND"),
    (domain.AlreadyExists, "ALREADY_EXISTS"),
    (domain.Aborted, "ABORTED"),
    (domain.FailedPrecondition, "FAILED_PRECONDITION"),
    (domain.ResourceExhausted, "RESOURCE_EXHAUSTED"),
    (domain.Unimplemented, "UNIMPLEMENTED"),
    (domain.EngineAuthRefused, "UNAUTHENTICATED"),
    (domain.ChadburnError, "UNAVAILABLE"),
)


def code_of(error: domain.ChadburnError) -> str:
    """The name of a google.rpc.Code."""
    return next(code for branch, code in _CODES if isinstance(error, branch))
