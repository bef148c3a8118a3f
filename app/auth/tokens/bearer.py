"""Taking the token out of an Authorization header (RFC 6750 §2.1, RFC 9449 §7.1)."""

import re
from collections.abc import Sequence

from app.auth.tokens.errors import TokenMalformed, TokenMissing

BEARER, DPOP = "bearer", "dpop"

_B64TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


def bearer_token(authorization: Sequence[str]) -> str:
    """The token in the request's Authorization values (or ``authorization`` gRPC metadata).

    Raises :class:`TokenMissing` when there is none or it uses another scheme, and
    :class:`TokenMalformed` when there are several (which one would a proxy have checked?) or
    the value is not a token.
    """
    scheme, token = token_with_scheme(authorization)
    if scheme != BEARER:
        raise TokenMissing
    return token


def token_with_scheme(authorization: Sequence[str]) -> tuple[str, str]:
    """The scheme in lower case, and the token. Raises as `bearer_token`, of two schemes."""
    if not authorization:
        raise TokenMissing
    if len(authorization) > 1:
        raise TokenMalformed("More than one Authorization header was sent.")
    scheme, _, token = authorization[0].strip().partition(" ")
    scheme = scheme.lower()
    if scheme not in (BEARER, DPOP):
        raise TokenMissing
    token = token.strip()
    if not _B64TOKEN.fullmatch(token):
        raise TokenMalformed
    return scheme, token
