"""The caller, as a verified token describes it, or whatever else proves one."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from app.auth.tokens.errors import InsufficientScope
from app.domain.scopes import Scope
from app.domain.selectors import Selector


class PrincipalKind(StrEnum):
    """Whether a person or a program stands behind the call."""

    PERSON = "person"
    """The token proves a subject other than the client that obtained it."""
    CLIENT = "client"
    """A program acting for itself, or a token that does not prove a person."""


class AudienceKind(StrEnum):
    """Which of the issuer's audiences the token was made for."""

    ADMIN = "admin"
    INFERENCE = "inference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A caller whose token has been verified.

    ``(issuer, subject, client_id)`` is the identity; none of the three is unique alone.
    Strings are 1..255 characters without control characters; ``client_id`` is empty where the
    issuer does not state one.
    """

    issuer: str
    subject: str
    client_id: str
    scopes: frozenset[Scope]
    """Admin scopes the token literally grants; always empty for an inference audience."""
    expires_at: datetime
    """UTC, as the token states it, without leeway: streams end here."""
    token_id: str | None = None
    """``jti``, for audit; not used to decide anything."""
    kind: PrincipalKind = PrincipalKind.CLIENT
    audience: AudienceKind = AudienceKind.ADMIN
    groups: frozenset[str] = frozenset()
    """Of the claims that the issuer's settings name; only a policy gives them a meaning."""
    engines: Selector = field(default_factory=Selector, hash=False)
    """On which the scopes hold at most; tokens say nothing of that."""

    @property
    def may_administer(self) -> bool:
        """Whether any admin route may answer other than 403: admin audience and some scope."""
        return self.audience is AudienceKind.ADMIN and bool(self.scopes)

    def require(self, *scopes: Scope) -> None:
        """Raise :class:`InsufficientScope` unless the caller holds every one of ``scopes``.

        With none named the caller still needs to be one who may administer at all, so that an
        empty requirement is not an open door for inference tokens.
        """
        if not self.may_administer or not self.scopes.issuperset(scopes):
            raise InsufficientScope(scopes)
