"""As much of curl as the pages and printed lines use, for machines that have none:
`python curl.py ARGS`."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx2


def main() -> None:
    headers: dict[str, str] = {}
    body, url, limit_s, method, out, dump, shown = None, "", None, "", "", "", False
    words = iter(sys.argv[1:])
    for word in words:
        if word == "-H":
            given = next(words)
            text = Path(given[1:]).read_text() if given.startswith("@") else given
            name, _, value = text.strip().partition(": ")
            headers[name] = value
        elif word == "-d":
            body = next(words)
        elif word == "--json":
            body = next(words)
            headers |= {"Content-Type": "application/json", "Accept": "application/json"}
        elif word == "-X":
            method = next(words)
        elif word == "-o":
            out = next(words)
        elif word == "-D":
            dump = next(words)
        elif word == "--max-time":
            limit_s = float(next(words))
        elif word in {"-s", "-sN", "-sS", "-sSN", "-si"}:
            shown = word == "-si"
        elif word.startswith("-"):
            sys.exit(f"curl.py does not know {word}")
        else:
            url = word
    method = method or ("GET" if body is None else "POST")
    try:
        with httpx2.stream(
            method, url, headers=headers, content=body, timeout=limit_s or 60
        ) as answer:
            head = [f"HTTP/1.1 {answer.status_code} {answer.reason_phrase}"]
            head += [f"{name}: {value}" for name, value in answer.headers.items()]
            if dump:
                Path(dump).write_text("\n".join(head) + "\n\n")
            if shown:
                print("\n".join(head) + "\n", flush=True)
            if out:
                Path(out).write_bytes(answer.read())
                return
            for text in answer.iter_text():
                print(text, end="", flush=True)
    except httpx2.TimeoutException:
        sys.exit(28)


if __name__ == "__main__":
    main()
