"""docs/api-by-example.md has every route. That each line of it does what it says is seen by
test_pages.py, which types it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

from tests.e2e.pages import ROOT, commands_of

PAGE = "docs/api-by-example.md"
OPENAPI = ROOT / "docs" / "openapi.json"
# curl's options that are followed by a value.
WITH_VALUE = {"-X", "-H", "-d", "-o", "--max-time"}


def asked() -> Iterator[tuple[str, str]]:
    """Method and path of each curl."""
    for command in commands_of(PAGE):
        if not command.text.startswith("curl "):
            continue
        assert re.search(r"# \d{3}$", command.text), f"{command}: says no status"
        method, path, has_body = "", "", False
        words = iter(shlex.split(command.text, comments=True)[1:])
        for word in words:
            value = next(words) if word in WITH_VALUE else ""
            method = value if word == "-X" else method
            has_body = has_body or word == "-d"
            if not word.startswith("-"):
                path = re.sub(r"\$(?!URL)[A-Z]+", "x", word).removeprefix("$URL").partition("?")[0]
        yield method or ("POST" if has_body else "GET"), path


def test_every_route_is_in_it_and_nothing_else() -> None:
    routes = {
        (method.upper(), path)
        for path, methods in json.loads(OPENAPI.read_text())["paths"].items()
        for method in methods
    }
    missing, strange = set(routes), []
    for method, path in asked():
        found = {
            (known, route)
            for known, route in routes
            if known == method and re.fullmatch(re.sub(r"\{.*?\}", "[^/]+", route), path)
        }
        missing -= found
        strange += [] if found else [(method, path)]
    assert missing == set()
    # The document does not describe itself.
    assert strange == [("GET", "/openapi.json")]
