"""A report as text, JSON and JUnit."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from app.conformance.case import Case, Lack, Need, Verdict
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
    lack=Lack.OPTION,
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
    assert "NOT PROVEN by this run, for want of an option:" in text
    assert "b.absent: b.absent is promised." in text
    assert text.endswith("engine:1: 1 passed, 1 failed, 1 not proven, 0 not promised")


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


_TEXT = st.text(max_size=20)


@st.composite
def findings(draw: st.DrawFn) -> tuple[Finding, ...]:
    found = []
    for number in range(draw(st.integers(0, 8))):
        verdict = draw(st.sampled_from(Verdict))
        absent = verdict is Verdict.NOT_APPLICABLE
        failed = verdict is Verdict.FAIL
        found.append(
            Finding(
                case=case(f"group{draw(st.integers(0, 2))}.case{number}"),
                verdict=verdict,
                seconds=draw(st.floats(0, 100)),
                lack=draw(st.sampled_from(Lack)) if absent else None,
                reason=draw(_TEXT) if absent else "",
                expected=draw(_TEXT) if failed else "",
                seen=draw(_TEXT) if failed else "",
            )
        )
    return tuple(found)


@given(findings(), st.none() | st.text(min_size=1, max_size=20))
def test_whatever_was_found_every_form_of_the_report_agrees(
    found: tuple[Finding, ...], left: str | None
) -> None:
    report = Report(target="engine:1", findings=found, left_behind=left)
    bad = {Verdict.FAIL} & {one.verdict for one in found}
    untried = Lack.NOT_TRIED in {one.lack for one in found}
    assert report.passed is (not bad and not untried and left is None)
    told = document(report)
    assert told["passed"] is report.passed
    assert sum(told["counts"].values()) == len(found) == len(told["cases"])
    absent = {one.case.id for one in found if one.verdict is Verdict.NOT_APPLICABLE}
    # Each of them is accounted for, once, and none of those that were judged.
    assert len(told["not_proven"]) + len(told["not_promised"]) == len(absent)
    assert {*told["not_proven"], *told["not_promised"]} == absent
    text = summary(report)
    for one in found:
        assert (one.verdict is Verdict.PASS) == (one.case.id not in text)
    suite = ElementTree.fromstring(junit(report))
    cases = list(suite.iter("testcase"))
    assert int(suite.get("tests") or 0) == len(found)
    assert len(cases) == len(found) + (left is not None)
    for one, element in zip(found, cases, strict=False):
        kinds = [child.tag for child in element]
        wanted = {Verdict.PASS: [], Verdict.FAIL: ["failure"]}.get(one.verdict, ["skipped"])
        assert kinds == wanted
