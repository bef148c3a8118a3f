"""Tokens of the demo's issuer, by client credentials."""

from __future__ import annotations

from collections.abc import Iterable

import httpx2

ROLES = ("operator", "reader", "inference", "engine")


class TokenRefused(Exception):
    """The issuer gives no such token, or gives no answer (`answered` False)."""

    def __init__(self, why: str, *, answered: bool) -> None:
        super().__init__(why)
        self.answered = answered


async def fetch_tokens(issuer: str, secret: str) -> dict[str, str]:
    """One token per role, each with all that the role may have. Raises TokenRefused."""
    return {role: await fetch_token(issuer, role, secret, ()) for role in ROLES}


async def fetch_token(issuer: str, client_id: str, secret: str, scopes: Iterable[str]) -> str:
    """Raises TokenRefused."""
    form = {"grant_type": "client_credentials"}
    if wanted := " ".join(scopes):
        form["scope"] = wanted
    try:
        async with httpx2.AsyncClient(timeout=10.0) as client:
            answer = await client.post(f"{issuer}/token", data=form, auth=(client_id, secret))
            found = answer.json()
    except (httpx2.TransportError, ValueError) as error:
        what = str(error) or type(error).__name__
        raise TokenRefused(f"no token from {issuer}: {what}", answered=False) from error
    if answer.status_code != 200:
        why = found.get("error_description") or found.get("error") or answer.status_code
        raise TokenRefused(f"{issuer} gives no such token: {why}", answered=True)
    return str(found["access_token"])
