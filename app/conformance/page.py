"""The list of cases as text, for the terminal and for docs/conformance.md."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from app.conformance.case import Case, Need

BEGIN, END = "<!-- cases: begin -->", "<!-- cases: end -->"
_WORDS = {
    Need.INFERENCE: "inference address",
    Need.HOOK: "fault hook",
    Need.DESTRUCTIVE: "`--destructive`",
    Need.CREDENTIAL: "token",
    Need.REFUSED: "refused token",
    Need.WEIGHTS: "weights",
    Need.COPY: "copy of the weights",
    Need.SCRATCH: "scratch folder",
    Need.SHARED: "shared memory prefix",
}


def listing(cases: Sequence[Case]) -> str:
    """One line for the id and one for the sentence."""
    return "\n".join(f"{case.id}{_needed(case)}\n    {case.sentence}" for case in cases)


def tables(cases: Sequence[Case]) -> str:
    """A Markdown table for each group, that is for each first part of an id."""
    parts = [f"{len(cases)} cases."]
    for group, members in groupby(sorted(cases, key=_group), key=_group):
        rows = [f"| `{c.id}` | {c.sentence} | {_needed(c, '')} |" for c in members]
        parts.append("\n".join([f"### {group}", "", *_HEAD, *rows]))
    return "\n\n".join(parts)


_HEAD = ("| id | what the engine promises | needs |", "|---|---|---|")


def with_tables(page: str, cases: Sequence[Case]) -> str:
    """The page with the part between the two marks replaced. ValueError without them."""
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{tables(cases)}\n\n{END}{after}"


def _group(case: Case) -> str:
    return case.id.partition(".")[0]


def _needed(case: Case, before: str = "  needs ") -> str:
    words = ", ".join(_WORDS[need] for need in case.needs)
    return f"{before}{words}" if words else ""
