"""Why a token was not accepted: one leaf per cause, each with a stable ``reason``.

No status codes here: an HTTP edge answers ``TokenRefused`` with 401 and ``KeysUnavailable`` with
503, a gRPC edge with UNAUTHENTICATED and UNAVAILABLE. Messages never quote the token.
"""

from typing import ClassVar


class TokenError(Exception):
    """The root of everything a verifier raises."""

    reason: ClassVar[str] = "TOKEN_ERROR"
    description: ClassVar[str] = "The access token could not be judged."

    def __init__(self, description: str | None = None) -> None:
        super().__init__(description or self.description)


class TokenRefused(TokenError):
    """The caller has not shown a valid token: challenge it."""


class TokenMissing(TokenRefused):
    """No bearer token at all; RFC 6750 wants a challenge without an error code."""

    reason = "TOKEN_MISSING"
    description = "A bearer access token is required."


class TokenInvalid(TokenRefused):
    """A token was shown and is no good: ``error="invalid_token"``."""

    reason = "TOKEN_INVALID"
    description = "The access token is not valid."


class TokenMalformed(TokenInvalid):
    reason = "TOKEN_MALFORMED"
    description = "The access token is not a well-formed signed JWT."


class TokenTooLarge(TokenInvalid):
    reason = "TOKEN_TOO_LARGE"
    description = "The access token is larger than this service accepts."


class IssuerForeign(TokenInvalid):
    reason = "TOKEN_ISSUER_FOREIGN"
    description = "The access token comes from an issuer that is not trusted here."


class AlgorithmRefused(TokenInvalid):
    reason = "TOKEN_ALGORITHM_REFUSED"
    description = "The access token is signed with an algorithm not allowed for its issuer."


class KeyUnknown(TokenInvalid):
    reason = "TOKEN_KEY_UNKNOWN"
    description = "The access token is signed with a key its issuer does not publish."


class SignatureInvalid(TokenInvalid):
    reason = "TOKEN_SIGNATURE_INVALID"
    description = "The access token's signature does not verify."


class TokenTypeRefused(TokenInvalid):
    """An ID token, a refresh token, anything not provably an access token."""

    reason = "TOKEN_TYPE_REFUSED"
    description = "The token is not an access token."


class TokenBound(TokenInvalid):
    """A sender-constrained token (``cnf``) shown as a plain bearer token."""

    reason = "TOKEN_BOUND"
    description = "The access token is bound to a key and is not accepted as a bearer token."


class ClaimMissing(TokenInvalid):
    reason = "TOKEN_CLAIM_MISSING"

    def __init__(self, claim: str) -> None:
        super().__init__(f"The access token has no {claim!r} claim.")
        self.claim = claim


class ClaimInvalid(TokenInvalid):
    reason = "TOKEN_CLAIM_INVALID"

    def __init__(self, claim: str) -> None:
        super().__init__(f"The access token's {claim!r} claim is not usable.")
        self.claim = claim


class TokenExpired(TokenInvalid):
    reason = "TOKEN_EXPIRED"
    description = "The access token has expired."


class TokenNotYetValid(TokenInvalid):
    reason = "TOKEN_NOT_YET_VALID"
    description = "The access token is not valid yet."


class AudienceForeign(TokenInvalid):
    reason = "TOKEN_AUDIENCE_FOREIGN"
    description = "The access token was made for another audience."


class KeysUnavailable(TokenError):
    """The issuer's keys are out of reach, so the token can be neither trusted nor refused."""

    reason = "ISSUER_UNAVAILABLE"
    description = "The token's issuer cannot be reached to verify the token."

    def __init__(self, issuer: str, retry_after_s: float) -> None:
        super().__init__()
        self.issuer = issuer
        self.retry_after_s = retry_after_s
