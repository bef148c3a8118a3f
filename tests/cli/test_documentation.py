"""What the documentation tells people to type exists, and its settings can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from app.auth.policy.reading import read_policy
from app.cli import app
from app.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINE = re.compile(r"(?:^\$ |^exec |\$\(|^)(?:[A-Z]+=\S+ )*(chadburn [^\n)`|;&#>]*)", re.M)


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)
    return [text for language, text in found if language in languages]


def typed() -> list[str]:
    """Every `chadburn …` of a block that shows commands."""
    return [
        line.partition("$(")[0].strip()
        for page in PAGES
        for block in blocks(page, "console", "sh", "bash")
        for line in LINE.findall(block.replace("\\\n", " "))
    ]


def test_there_is_something_to_check() -> None:
    assert len(typed()) > 10


@pytest.mark.parametrize("line", sorted(set(typed())))
def test_the_verb_and_its_options_exist(line: str) -> None:
    words = line.replace('"', " ").split()[1:]
    command = typer.main.get_command(app)
    while isinstance(command, TyperGroup) and words:
        verb = words.pop(0)
        assert verb in command.commands, f"there is no {verb!r}"
        command = command.commands[verb]
    known = {option for parameter in command.params for option in parameter.opts}
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert given <= known | {"--help"}


SHOWN = [text for page in PAGES for text in blocks(page, "toml") if "issuer" in text]
RULES = "[[rules]]"


@pytest.mark.parametrize("text", [text for text in SHOWN if RULES in text])
def test_the_policies_shown_are_policies(text: str) -> None:
    read_policy(text.encode())


@pytest.mark.parametrize("text", [text for text in SHOWN if RULES not in text])
def test_the_settings_shown_are_settings(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shown.toml").write_text(text)
    load_settings(tmp_path / "shown.toml")
