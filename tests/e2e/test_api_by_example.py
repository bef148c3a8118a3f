"""docs/api-by-example.md: every route is in it, and every line of it does what it says."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.processes import Demo, cleaned

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api-by-example.md"
OPENAPI = ROOT / "docs" / "openapi.json"
SAID = re.compile(r"\$ curl (?P<words>.*?)\s+# (?P<status>\d{3})")
NAMED = re.compile(
    r'\$ (?P<name>[A-Z]+)=(?P<value>"[^"]+"|\S+?)(\s+# ((?P<path>\S+) of the answer|.*))?'
)


def lines() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@dataclass
class Asked:
    """A line of curl, taken apart."""

    method: str = ""
    url: str = ""
    headers: list[str] = field(default_factory=list)
    body: str | None = None
    limit_s: float | None = None

    @classmethod
    def by(cls, words: str, names: Mapping[str, str]) -> Asked:
        """`names`: the shell's variables."""
        asked = cls()
        options = iter(shlex.split(re.sub(r"\$([A-Z]+)", lambda found: names[found[1]], words)))
        for word in options:
            match word:
                case "-X":
                    asked.method = next(options)
                case "-H":
                    asked.headers.append(next(options))
                case "-d":
                    asked.body = next(options)
                case "--max-time":
                    asked.limit_s = float(next(options))
                case "-o":
                    next(options)
                case "-s" | "-sN":
                    pass
                case _:
                    assert not word.startswith("-"), word
                    asked.url = word
        asked.method = asked.method or ("GET" if asked.body is None else "POST")
        return asked


class Shell:
    """As much of a shell and of curl as the page uses."""

    def __init__(self, base_url: str, folder: Path) -> None:
        self._folder = folder
        until = datetime.now(UTC) + timedelta(hours=1)
        self._own = {"URL": base_url, "UNTIL": until.isoformat(), "PWD": str(folder)}
        self._names: dict[str, str] = {}
        self.answer: Any = None

    def name(self, name: str, value: str, path: str | None) -> None:
        """`path`: where the value stands in the answer before."""
        found = self.answer
        for part in path.split(".") if path else ():
            found = found[int(part)] if part.isdigit() else found[part]
        self._names[name] = str(found) if path else value.strip('"')

    def curl(self, words: str) -> int:
        """The answer's status. `make demo` keeps its data elsewhere than the demo here."""
        asked = Asked.by(words.replace(".data/demo/", "data/"), self._names | self._own)
        headers = dict(self._text(one).partition(": ")[::2] for one in asked.headers)
        with httpx2.stream(
            asked.method, asked.url, headers=headers, content=asked.body, timeout=30
        ) as answer:
            # One with a limit of its own never ends by itself.
            text = b"" if asked.limit_s else answer.read()
        is_json = answer.headers.get("content-type", "").endswith("json")
        self.answer = json.loads(text) if is_json and text else None
        return answer.status_code

    def _text(self, header: str) -> str:
        if not header.startswith("@"):
            return header
        name = header[1:].replace(".data/demo/", "data/")
        return (self._folder / name).read_text().strip()


def test_every_route_is_in_it() -> None:
    missing = {
        (method.upper(), path)
        for path, methods in json.loads(OPENAPI.read_text())["paths"].items()
        for method in methods
    }
    names = defaultdict(lambda: "x", URL="")
    for line in lines():
        if found := SAID.fullmatch(line):
            asked = Asked.by(found["words"], names)
            asked_path = asked.url.partition("?")[0]
            missing -= {
                (method, path)
                for method, path in missing
                if method == asked.method
                and re.fullmatch(re.sub(r"\{.*?\}", "[^/]+", path), asked_path)
            }
    assert missing == set()


@pytest.mark.long
def test_every_line_does_what_it_says(tmp_path: Path) -> None:
    demo = Demo.start(tmp_path)
    with cleaned(demo.process):
        shell = Shell(demo.ready["base_url"], demo.folder)
        ran = 0
        for line in lines():
            if found := SAID.fullmatch(line):
                status = shell.curl(found["words"])
                assert status == int(found["status"]), f"{line}: {status} {shell.answer}"
                ran += 1
            else:
                named = NAMED.fullmatch(line)
                assert named is not None, f"not understood: {line}"
                shell.name(named["name"], named["value"], named["path"])
        assert ran > 40
