"""The commands that the README and docs/ tell people to type, block by block.

Two kinds of fenced blocks hold commands. `console`: what is typed, each after `$ `, and below it
what comes back. `sh`: a script, run as a whole. A block of anything else says what it is (`text`,
`toml`, `json`, …), so that no command hides in one without a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
TYPED = ("console", "sh")
# Of other kinds; a new one is thought about before it is added.
SHOWN = frozenset({"text", "toml", "json", "yaml", "python", "http"})

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<title>[^\n]*)\n(?P<text>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True, slots=True)
class Command:
    """`text`: as it is typed, over several lines where it is. `said`: what the page shows of the
    answer."""

    page: str
    line: int
    text: str
    said: tuple[str, ...] = ()
    script: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language or 'no language'})"

    def commands(self) -> tuple[Command, ...]:
        """Raises ValueError for a console that begins with something else than a command."""
        if self.language == "sh":
            return (Command(self.page, self.line + 1, self.text.rstrip(), script=True),)
        return tuple(self._typed()) if self.language == "console" else ()

    def _typed(self) -> Iterator[Command]:
        typed, said, began, goes_on = list[str](), list[str](), 0, False
        for number, line in enumerate(self.text.splitlines(), start=self.line + 1):
            if goes_on:
                typed.append(line)
            elif line.startswith("$ "):
                if typed:
                    yield Command(self.page, began, "\n".join(typed), tuple(said))
                typed, said, began = [line[2:]], [], number
            elif not typed:
                raise ValueError(f"{self}: the first line begins without '$ '")
            elif line.strip():
                said.append(line)
                continue
            else:
                continue
            goes_on = line.endswith("\\")
        if typed:
            yield Command(self.page, began, "\n".join(typed), tuple(said))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        indent = fence["indent"]
        lines = [line.removeprefix(indent) for line in fence["text"].splitlines()]
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(name_of(page), line, fence["language"], "\n".join(lines) + "\n"))
    return found


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def commands_of(page: str) -> list[Command]:
    blocks = blocks_of(ROOT / page)
    return [command for block in blocks for command in block.commands()]


def all_commands() -> list[Command]:
    return [command for block in all_blocks() for command in block.commands()]


def unfenced_commands() -> list[str]:
    """Lines that look like commands of a console and stand in no fence."""
    found = []
    for page in PAGES:
        prose = _FENCE.sub("", page.read_text())
        found += [f"{name_of(page)}: {line}" for line in prose.splitlines() if _prompt(line)]
    return found


def _prompt(line: str) -> bool:
    return line.lstrip().startswith("$ ")


def inline_code(page: Path) -> list[str]:
    """What stands between single backticks in running text and tables."""
    return _INLINE.findall(_FENCE.sub("", page.read_text()))
