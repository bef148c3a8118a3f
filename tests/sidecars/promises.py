"""The cases of conformance that sidecars are asked for, and what of a report must hold."""

from __future__ import annotations

from collections.abc import Collection

from app.conformance.case import Verdict
from app.conformance.trial import Options
from tests.conformance.judging import failures, ids_of, judged

SHORT = (
    "profile.consistent",
    "retry.same-payload",
    "pause.each-mode",
    "update.version-moves-with-success",
    "stream.gap-free",
)


async def the_gist_holds(options: Options) -> None:
    report = await judged(options, *SHORT)
    assert not failures(report)
    assert not report.of(Verdict.NOT_APPLICABLE)


async def all_holds(
    options: Options, not_offered: tuple[str, ...], not_shown: Collection[str]
) -> None:
    """Nothing fails, and nothing is left out but what begins with one of `not_offered` or is one of
    `not_shown`."""
    report = await judged(options)
    assert not failures(report)
    absent = ids_of(report, Verdict.NOT_APPLICABLE)
    assert {one for one in absent - set(not_shown) if not one.startswith(not_offered)} == set()
