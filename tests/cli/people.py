"""People who log in: what they read in the terminal, and what they do in their browser."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx2

from app.devidp.codes import page_code

ISSUER_SECRET = "s" * 40
"""That of tests.http.gateway's issuer."""


class Terminal(io.StringIO):
    """Standard error, with a person before it who does what it says as soon as it says so."""

    def __init__(self, act: Callable[[str], None]) -> None:
        super().__init__()
        self._act = act

    def write(self, text: str) -> int:
        written = super().write(text)
        found = re.search(r"^Open  (\S+)$", text, re.MULTILINE)
        if found is not None:
            self._act(found.group(1))
        return written

    def isatty(self) -> bool:
        return False


def picks(person: str) -> Callable[[str], None]:
    """At the development issuer."""
    return lambda url: _decide(url, {"code": page_code(ISSUER_SECRET), "person": person})


def refuses(url: str) -> None:
    _decide(url, {"deny": "1"})


def _decide(url: str, form: dict[str, str]) -> None:
    with httpx2.Client() as browser:
        page = browser.get(url)
        assert page.status_code == 200, page.text
        answer = browser.post(urljoin(url, "/device"), data={**_hidden(page), **form})
        assert answer.status_code == 200, answer.text


def logs_in_as(name: str) -> Callable[[str], None]:
    """At the real provider: through its pages, to the last."""

    def act(url: str) -> None:
        with httpx2.Client(follow_redirects=True) as browser:
            page = browser.get(url)
            login = {"prompt": "login", "login": name, "password": "any"}
            for form in ({}, {}, login, {"prompt": "consent"}):
                action = re.search(r'action="([^"]+)"', page.text)
                assert action is not None, page.text
                where = urljoin(str(page.url), unescape(action.group(1)))
                page = browser.post(where, data={**_hidden(page), **form})
            assert "Sign-in Success" in page.text

    return act


def _hidden(page: httpx2.Response) -> dict[str, str]:
    return dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', page.text))


def only_login(folder: Path) -> Path:
    """The file that is kept of the one login in the user's configuration."""
    (found,) = (folder / "chadburn").glob("*.json")
    return found


def kept(folder: Path) -> dict[str, Any]:
    return dict(json.loads(only_login(folder).read_text()))


def change(folder: Path, **members: Any) -> None:
    only_login(folder).write_text(json.dumps({**kept(folder), **members}))


def kept_anything(folder: Path) -> bool:
    return folder.exists()
