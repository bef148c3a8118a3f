"""Links of the README and of docs/ lead somewhere, and every page is found from the README."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def text_of(page: Path) -> str:
    """Without what is code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    words = (re.sub(r"[`*]", "", one) for one in re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in words}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    for target, anchor in LINK.findall(text_of(page)):
        yield (page.parent / target).resolve() if target else page, anchor


def test_links_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target.name}#{anchor}"
        for page in PAGES
        for target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert broken == []


def test_every_page_is_found_from_the_readme() -> None:
    found, ahead = set[Path](), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in found:
            found.add(page)
            near = (target for target, _ in links(page) if target.suffix == ".md")
            ahead += [one for one in near if one.exists()]
    decisions = ROOT / "docs" / "adr"
    assert [page.name for page in PAGES if page not in found and page.parent != decisions] == []
