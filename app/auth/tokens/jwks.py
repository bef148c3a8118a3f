"""The keys of one issuer: fetched, kept, refreshed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerState:
    """How an issuer's keys stand."""

    issuer: str
    ok: bool
    """False (degraded): no keys, or the last attempt to refresh them failed."""
    keys: int
    age_s: float | None
    """Seconds since the keys were last fetched; None when they never were."""
    problem: str | None
    """Why the last attempt failed, in words fit for an operator's log; no secrets."""
