"""Prefer (RFC 7240), Accept (RFC 9110 section 12.5.1) and the Idempotency-Key header."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from app.domain.errors import MissingIdempotencyKey
from app.domain.idempotency import check_key
from app.http.refusals import MalformedRequest, NothingAcceptable

MAX_WAIT_S = 25
_WAIT = re.compile(r"wait\s*=\s*\"?([0-9]{1,6})\"?", re.IGNORECASE)
_QUOTED = re.compile(r'"(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*"')


@dataclass(frozen=True, slots=True)
class Preference:
    """`wait_s` 0: answer at once. `applied`: for Preference-Applied; None: nothing to say."""

    wait_s: int = 0
    applied: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        said = {} if self.applied is None else {"Preference-Applied": self.applied}
        return {"Vary": "Prefer", **said}


def preference_of(values: Sequence[str]) -> Preference:
    """What is understood is honoured, the rest ignored: a preference is never an error."""
    applied: list[str] = []
    wait_s = 0
    for part in ",".join(values).split(","):
        name = part.partition(";")[0].strip()
        found = _WAIT.fullmatch(name)
        if found and not wait_s and int(found[1]):
            wait_s = min(int(found[1]), MAX_WAIT_S)
            applied.append(f"wait={wait_s}")
        elif name.lower() == "respond-async" and name not in applied:
            applied.append("respond-async")
    return Preference(wait_s, ", ".join(applied) or None)


def chosen_type(values: Sequence[str], offered: tuple[str, ...]) -> str:
    """The best of `offered` for an Accept header; the first of them where there is a tie or no
    header. Raises NothingAcceptable."""
    accepted = _ranges(",".join(values))
    if not accepted:
        return offered[0]
    best = max(offered, key=lambda kind: (_quality(kind, accepted), -offered.index(kind)))
    if _quality(best, accepted) <= 0:
        raise NothingAcceptable(offered)
    return best


def idempotency_key(value: str | None) -> str:
    """The key, quoted as a structured-field string or bare.

    Raises MissingIdempotencyKey, MalformedIdempotencyKey, MalformedRequest.
    """
    if value is None or not value:
        raise MissingIdempotencyKey("an order needs the Idempotency-Key header")
    if not value.startswith('"'):
        return check_key(value)
    if not _QUOTED.fullmatch(value):
        raise MalformedRequest("The Idempotency-Key is not a well-formed quoted string.")
    return check_key(re.sub(r"\\(.)", r"\1", value[1:-1]))


def _ranges(accept: str) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for part in accept.split(","):
        kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
        if not kind:
            continue
        quality = 1.0
        for parameter in parameters:
            name, _, given = parameter.partition("=")
            if name.strip() == "q":
                quality = _number(given.strip())
        found.append((kind, quality))
    return found


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"(0(\.[0-9]{0,3})?|1(\.0{0,3})?)", text) else 0.0


def _quality(kind: str, accepted: list[tuple[str, float]]) -> float:
    """The quality of the most specific range that takes `kind`; 0: none does."""
    family = kind.partition("/")[0]
    for wanted in (kind, f"{family}/*", "*/*"):
        for accepted_kind, quality in accepted:
            if accepted_kind == wanted:
                return quality
    return 0.0
