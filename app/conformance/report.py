"""What came of a run: as text, as JSON, and as a JUnit file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any
from xml.etree import ElementTree

from app.conformance.case import Case, Lack, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`lack` and `reason`: why a case was not applicable. `expected` and `seen`: of one that
    failed."""

    case: Case
    verdict: Verdict
    seconds: float
    lack: Lack | None = None
    reason: str = ""
    expected: str = ""
    seen: str = ""

    @property
    def why(self) -> str:
        if self.verdict is Verdict.FAIL:
            return f"expected {self.expected}; saw {self.seen}"
        return self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`left_behind`: how the engine differs from what it was, None when it does not."""

    target: str
    engine: dict[str, object] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    left_behind: str | None = None

    @property
    def passed(self) -> bool:
        """Nothing failed, all was tried, and the engine was left as it was found."""
        failed = any(finding.verdict is Verdict.FAIL for finding in self.findings)
        return not failed and not self.lacking(Lack.NOT_TRIED) and self.left_behind is None

    def of(self, verdict: Verdict) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict is verdict)

    def lacking(self, *lacks: Lack) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.lack in lacks)

    @property
    def not_proven(self) -> tuple[Finding, ...]:
        """What the engine may well promise, and this run says nothing about."""
        return self.lacking(Lack.OPTION, Lack.NOT_REACHED, Lack.NOT_TRIED)


def line(finding: Finding) -> str:
    """One case as it ends, for a person to follow."""
    why = f"  {finding.why}" if finding.why else ""
    return f"{finding.verdict.value:<14} {finding.case.id}{why}"


_WIDTH = 96
_HEADINGS = {
    Lack.NOT_PROMISED: "Not promised by this engine:",
    Lack.OPTION: "NOT PROVEN by this run, for want of an option:",
    Lack.NOT_REACHED: "NOT PROVEN by this run, since it could not be brought about:",
    Lack.NOT_TRIED: "NOT PROVEN by this run, since it was not tried:",
}


def _of_one_lack(lack: Lack, absent: Sequence[Finding]) -> list[str]:
    """Each reason once, with the promises that it touches: of those that nobody makes the ids."""
    lines = ["", _HEADINGS[lack]] if absent else []
    for reason in dict.fromkeys(finding.reason for finding in absent):
        lines.append(f"  {reason}")
        cases = [finding.case for finding in absent if finding.reason == reason]
        if lack is Lack.NOT_PROMISED:
            ids = ", ".join(case.id for case in cases)
            lines += [f"    {part}" for part in wrap(ids, _WIDTH, break_on_hyphens=False)]
        else:
            lines += [f"    {case.id}: {case.sentence}" for case in cases]
    return lines


def summary(report: Report) -> str:
    """What failed, what was not proven and why, and the count."""
    lines: list[str] = []
    for finding in report.of(Verdict.FAIL):
        lines += [
            "",
            f"FAILED  {finding.case.id}",
            f"  promise   {finding.case.sentence}",
            f"  expected  {finding.expected}",
            f"  seen      {finding.seen}",
        ]
    for lack in _HEADINGS:
        lines += _of_one_lack(lack, report.lacking(lack))
    if report.left_behind is not None:
        lines += ["", f"THE ENGINE IS NOT AS IT WAS FOUND: {report.left_behind}"]
    count = Counter(finding.verdict for finding in report.findings)
    lines += [
        "",
        f"{report.target}: {count[Verdict.PASS]} passed, {count[Verdict.FAIL]} failed, "
        f"{len(report.not_proven)} not proven, "
        f"{len(report.lacking(Lack.NOT_PROMISED))} not promised",
    ]
    return "\n".join(lines).lstrip("\n")


def document(report: Report) -> dict[str, Any]:
    """For programs. `not_proven` and `not_promised` hold the ids of the cases that were not
    applicable."""
    count = Counter(finding.verdict for finding in report.findings)
    return {
        "target": report.target,
        "engine": report.engine,
        "passed": report.passed,
        "left_behind": report.left_behind,
        "counts": {verdict.value.replace("-", "_"): count[verdict] for verdict in Verdict},
        "not_proven": [finding.case.id for finding in report.not_proven],
        "not_promised": [finding.case.id for finding in report.lacking(Lack.NOT_PROMISED)],
        "cases": [
            {
                "id": finding.case.id,
                "sentence": finding.case.sentence,
                "verdict": finding.verdict.value,
                "lack": finding.lack.value if finding.lack else None,
                "reason": finding.reason or None,
                "expected": finding.expected or None,
                "seen": finding.seen or None,
                "seconds": round(finding.seconds, 3),
            }
            for finding in report.findings
        ],
    }


def junit(report: Report) -> bytes:
    """A `testsuite` with one `testcase` for each case; not applicable ones are `skipped`."""
    suite = ElementTree.Element(
        "testsuite",
        name="openengine.v1.OpenEngineAdmin",
        tests=str(len(report.findings)),
        failures=str(len(report.of(Verdict.FAIL))),
        errors=str(int(report.left_behind is not None)),
        skipped=str(len(report.of(Verdict.NOT_APPLICABLE))),
        time=f"{sum(finding.seconds for finding in report.findings):.3f}",
    )
    for finding in report.findings:
        group, _, name = finding.case.id.partition(".")
        case = ElementTree.SubElement(
            suite, "testcase", classname=group, name=name, time=f"{finding.seconds:.3f}"
        )
        if finding.verdict is Verdict.FAIL:
            failure = ElementTree.SubElement(case, "failure", message=_clean(finding.expected))
            failure.text = _clean(f"{finding.case.sentence}\n{finding.why}")
        elif finding.verdict is Verdict.NOT_APPLICABLE:
            lack = finding.lack.value if finding.lack else "not-applicable"
            message = _clean(f"{lack}: {finding.reason}")
            ElementTree.SubElement(case, "skipped", message=message)
    if report.left_behind is not None:
        case = ElementTree.SubElement(suite, "testcase", classname="suite", name="left-as-found")
        ElementTree.SubElement(case, "error", message=_clean(report.left_behind))
    raw: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return raw


def _clean(text: str) -> str:
    """An engine's words can hold what XML cannot."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
