"""Why a caller was not let through: one leaf per cause, each with a stable ``reason``.

No status codes here. Edges map the branches: ``TokenRefused`` to 401 or UNAUTHENTICATED,
``PermissionDenied`` to 403 or PERMISSION_DENIED; ``IssuerUnavailable`` is an ``Unavailable`` as any
other. Messages never quote the token.
"""

from collections.abc import Iterable
from typing import ClassVar

from app.domain.errors import ChadburnError, Unavailable
from app.domain.scopes import Scope


class TokenRefused(ChadburnError):
    """The caller has not shown a valid token: challenge it."""

    reason = "TOKEN_REFUSED"
    description: ClassVar[str] = "The access token was not accepted."

    def __init__(self, description: str | None = None) -> None:
        super().__init__(description or self.description)


class PermissionDenied(ChadburnError):
    """The caller is known and may not do this."""

    reason = "PERMISSION_DENIED"


class InsufficientScope(PermissionDenied):
    """RFC 6750 ``error="insufficient_scope"``; ``required`` is all the call needs."""

    reason = "INSUFFICIENT_SCOPE"

    def __init__(self, required: Iterable[Scope]) -> None:
        self.required = tuple(sorted(required))
        word = "scope" if len(self.required) == 1 else "scopes"
        needs = f"the {word} {' and '.join(self.required)}" if self.required else "an admin scope"
        super().__init__(f"This needs {needs}.")


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


class TokenUnbound(TokenInvalid):
    """A token that would have to be bound to a key and is not."""

    reason = "TOKEN_UNBOUND"
    description = "The access token is not bound to a key, and has to be to be shown like this."


class ProofRefused(TokenRefused):
    """RFC 9449 §7.1 ``error="invalid_dpop_proof"``: the token may be good, its proof is not."""

    reason = "PROOF_REFUSED"


class ProofInvalid(ProofRefused):
    reason = "PROOF_INVALID"
    description = "The DPoP proof is not valid."


class ProofReplayed(ProofRefused):
    reason = "PROOF_REPLAYED"
    description = "The DPoP proof was shown before; each request takes one of its own."


class NonceNeeded(ProofRefused):
    """RFC 9449 section 9 ``error="use_dpop_nonce"``. ``nonce``: a good one, for the answer."""

    reason = "PROOF_NONCE_NEEDED"
    description = "The DPoP proof has to repeat a nonce of this service: the one in the answer."

    def __init__(self, nonce: str) -> None:
        super().__init__()
        self.nonce = nonce


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


class TokenInactive(TokenInvalid):
    """The issuer itself says no: revoked, expired, or never its own (RFC 7662 §2.2)."""

    reason = "TOKEN_INACTIVE"
    description = "The access token's issuer says that it is not active."


class IssuerUnavailable(Unavailable):
    """The issuer's keys, or its word, are out of reach, so the token can be neither trusted nor
    refused."""

    reason = "ISSUER_UNAVAILABLE"

    def __init__(self, issuer: str, *, retry_after_s: int) -> None:
        super().__init__(
            "The token's issuer cannot be reached to verify the token.",
            retry_after_s=retry_after_s,
        )
        self.issuer = issuer
