"""The settings and policies that the documentation shows can be read. Its commands are in
tests/e2e/test_pages.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.auth.policy.reading import read_policy
from app.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)
    return [text for language, text in found if language in languages]


SHOWN = [text for page in PAGES for text in blocks(page, "toml")]
RULES, LISTED = "[[rules]]", "[[engines]]"


@pytest.mark.parametrize("text", [text for text in SHOWN if RULES in text])
def test_the_policies_shown_are_policies(text: str) -> None:
    read_policy(text.encode())


@pytest.mark.parametrize(
    "text", [text for text in SHOWN if RULES not in text and LISTED not in text]
)
def test_the_settings_shown_are_settings(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shown.toml").write_text(text)
    load_settings(tmp_path / "shown.toml")
