"""If-Match, ETag and the two counters behind them (RFC 9110 section 13)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from app.domain.engine import Engine
from app.domain.errors import ConflictingRevisions
from app.http.refusals import MalformedPrecondition, PreconditionFailed, PreconditionMissing

_TAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]*"')
_OURS = re.compile(r'"([rg])(0|[1-9][0-9]{0,17})"')


def revision_tag(engine: Engine) -> str | None:
    """`"r7"`: the engine's administrative state. None: it was never read."""
    facts = engine.observed.facts
    return None if facts is None else f'"r{facts.revision}"'


def generation_tag(generation: int) -> str:
    """`"g3"`: the registration."""
    return f'"g{generation}"'


@dataclass(frozen=True, slots=True)
class Expectation:
    """`revision` None: none was named."""

    revision: int | None
    from_header: bool


def expected_revision(if_match: str | None, in_body: int | None) -> Expectation:
    """What an order expects the engine's revision to be.

    `*` asks for the engine to be there, which it is. Raises MalformedPrecondition,
    PreconditionFailed for a tag that cannot be a revision, ConflictingRevisions.
    """
    named = None if if_match in (None, "*") else _number(if_match or "", "r")
    if named is None:
        return Expectation(in_body, from_header=False)
    if in_body is not None and in_body != named:
        raise ConflictingRevisions("If-Match and expected_revision name different revisions")
    return Expectation(named, from_header=True)


def expected_generation(if_match: str | None) -> int:
    """The generation that a change of a registration builds on.

    `*` is no answer to the question, so it is refused. Raises PreconditionMissing,
    MalformedPrecondition, PreconditionFailed.
    """
    if if_match is None:
        raise PreconditionMissing
    if if_match == "*":
        raise MalformedPrecondition('Name the generation that you have read, such as "g3".')
    return _number(if_match, "g")


def _number(tag: str, letter: str) -> int:
    if not _TAG.fullmatch(tag):
        raise MalformedPrecondition(f'If-Match takes one quoted tag here, such as "{letter}7".')
    found = _OURS.fullmatch(tag)
    if found is None or found[1] != letter:
        # A weak tag never matches, and neither does one that we never gave out for this.
        raise PreconditionFailed(f'Only tags such as "{letter}7" can match here.')
    return int(found[2])
