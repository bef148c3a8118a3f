"""As much of curl as the printed lines use, for machines that have none: `python curl.py ARGS`."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx2


def main() -> None:
    headers: dict[str, str] = {}
    body, url, limit_s = None, "", None
    words = iter(sys.argv[1:])
    for word in words:
        if word == "-H":
            given = next(words)
            text = Path(given[1:]).read_text() if given.startswith("@") else given
            name, _, value = text.strip().partition(": ")
            headers[name] = value
        elif word == "-d":
            body = next(words)
        elif word == "--max-time":
            limit_s = float(next(words))
        elif word in {"-sS", "-sSN"}:
            continue
        elif word.startswith("-"):
            sys.exit(f"curl.py does not know {word}")
        else:
            url = word
    method = "GET" if body is None else "POST"
    try:
        with httpx2.stream(
            method, url, headers=headers, content=body, timeout=limit_s or 60
        ) as answer:
            for text in answer.iter_text():
                print(text, end="", flush=True)
    except httpx2.TimeoutException:
        sys.exit(28)


if __name__ == "__main__":
    main()
