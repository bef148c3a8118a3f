"""The list of cases, and the page that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.conformance.catalogue import catalogue, chosen
from app.conformance.page import with_tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"


def test_ids_are_unique_and_made_of_a_group_and_a_name() -> None:
    ids = [case.id for case in catalogue()]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z]+\.[a-z-]+", id_) for id_ in ids)


def test_every_sentence_is_one() -> None:
    for case in catalogue():
        assert case.sentence[0].isupper() or case.sentence.startswith(("`", "gRPC")), case.id
        assert case.sentence.endswith("."), case.id
        assert "  " not in case.sentence, case.id


def test_the_page_lists_what_there_is() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text, catalogue()) == text, "run scripts/gen-conformance-list"


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="cases: begin"):
        with_tables("# Conformance", catalogue())


def test_cases_are_chosen_by_pattern() -> None:
    retries = chosen(catalogue(), ["retry.*"])
    assert retries
    assert all(case.id.startswith("retry.") for case in retries)
    assert chosen(catalogue(), []) == catalogue()
    with pytest.raises(ValueError, match="no case is called nothing"):
        chosen(catalogue(), ["nothing.*"])
