"""A report as text, JSON and JUnit."""

from __future__ import annotations

from xml.etree import ElementTree

from app.conformance.case import Case, Need, Verdict
from app.conformance.report import Finding, Report, document, junit, line, summary
from app.conformance.trial import Trial


async def nothing(_trial: Trial) -> None:
    """Never run here."""


def case(id_: str, *needs: Need) -> Case:
    return Case(id=id_, sentence=f"{id_} is promised.", needs=needs, run=nothing)


PASSED = Finding(case=case("a.passes"), verdict=Verdict.PASS, seconds=0.5)
FAILED = Finding(
    case=case("a.fails"),
    verdict=Verdict.FAIL,
    seconds=0.25,
    expected="one terminal event",
    seen="two \x00 of them",
)
ABSENT = Finding(
    case=case("b.absent", Need.HOOK),
    verdict=Verdict.NOT_APPLICABLE,
    seconds=0,
    reason=Need.HOOK.value,
)
REPORT = Report(target="engine:1", findings=(PASSED, FAILED, ABSENT))


def test_a_line_says_why() -> None:
    assert line(PASSED).split() == ["pass", "a.passes"]
    assert "expected one terminal event; saw two" in line(FAILED)
    assert "--fault-hook" in line(ABSENT)


def test_the_summary_tells_failures_and_what_is_not_proven() -> None:
    text = summary(REPORT)
    assert "FAILED  a.fails" in text
    assert "promise   a.fails is promised." in text
    assert "Not proven by this run:" in text
    assert "b.absent: b.absent is promised." in text
    assert text.endswith("engine:1: 1 passed, 1 failed, 1 not applicable")


def test_only_a_report_without_failures_passes() -> None:
    assert not REPORT.passed
    assert Report(target="engine:1", findings=(PASSED, ABSENT)).passed
    left = Report(target="engine:1", findings=(PASSED,), left_behind="it is paused")
    assert not left.passed
    assert "NOT AS IT WAS FOUND: it is paused" in summary(left)


def test_the_document_has_all_of_it() -> None:
    told = document(REPORT)
    assert told["passed"] is False
    assert told["counts"] == {"pass": 1, "fail": 1, "not_applicable": 1}
    assert told["not_proven"] == ["b.absent"]
    assert told["cases"][1]["expected"] == "one terminal event"


def test_junit_can_be_read_also_with_words_that_xml_cannot_hold() -> None:
    suite = ElementTree.fromstring(junit(REPORT))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    passed, failed, absent = suite.iter("testcase")
    assert (passed.get("classname"), passed.get("name")) == ("a", "passes")
    failure = failed.find("failure")
    assert failure is not None
    assert failure.text is not None
    assert "a.fails is promised." in failure.text
    assert absent.find("skipped") is not None


def test_junit_counts_an_engine_left_behind_as_an_error() -> None:
    left = Report(target="engine:1", findings=(PASSED,), left_behind="it is paused")
    suite = ElementTree.fromstring(junit(left))
    assert suite.get("errors") == "1"
    assert [case.get("name") for case in suite.iter("testcase")][-1] == "left-as-found"
