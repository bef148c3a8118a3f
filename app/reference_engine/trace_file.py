"""Traces as they are handed out: checked, said what they are of, packed, and on the disk.

``python -m app.reference_engine.trace_file`` does so in a process of its own, since it takes long
and would hold up whatever else runs in the interpreter. It reads a list of files as JSON from its
standard input and answers with one JSON object, see :func:`main`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MEDIA_TYPE = "application/gzip"
KEY = "chadburn"
"""Where the file says what it is of, beside the trace's own keys."""

_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_FIRST = re.compile(r"\s*(?=[{\]])")
_NEXT = re.compile(r"\s*,\s*(?={)|\s*(?=\])")
_NICENESS = 10


class TraceInvalid(ValueError):
    """It is not a trace in the trace event format."""


def _no_constant(name: str) -> Any:
    raise TraceInvalid(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


@dataclass(frozen=True, slots=True)
class PackedTrace:
    path: Path
    size_bytes: int
    sha256: str


def pack(raw: Path, about: Mapping[str, Any]) -> PackedTrace:
    """Replace a file ``X.json`` by ``X.json.gz``, which is on the disk when this returns. Raises
    TraceInvalid or OSError."""
    text = raw.read_text(encoding="utf-8", errors="strict")
    begin = check(text)
    packed = raw.with_name(f"{raw.name}.gz")
    said = f'"{KEY}": {json.dumps(dict(about))}, '
    with packed.open("wb") as file:
        with gzip.GzipFile(filename="", mode="wb", compresslevel=5, fileobj=file, mtime=0) as gz:
            gz.write(text[:begin].encode())
            gz.write(said.encode())
            gz.write(text[begin:].encode())
        file.flush()
        os.fsync(file.fileno())
    raw.unlink()
    with packed.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return PackedTrace(packed, packed.stat().st_size, sha256)


def check(text: str) -> int:
    """That it is one JSON object with ``traceEvents``, each with ``ph``, ``ts`` and ``name``; where
    that key begins. Raises TraceInvalid.

    Event by event: as one value a long trace would take many times its size.
    """
    found = _EVENTS.search(text)
    if found is None:
        raise TraceInvalid("there are no traceEvents")
    try:
        at = _past(_FIRST, text, found.end())
        while text[at] != "]":
            event, at = _DECODER.raw_decode(text, at)
            if not isinstance(event, dict) or not {"ph", "ts", "name"} <= event.keys():
                raise TraceInvalid("an event has no ph, ts or name")
            at = _past(_NEXT, text, at)
        _DECODER.decode(f"{text[: found.end()]}{text[at:]}")
    except TraceInvalid:
        raise
    except (ValueError, IndexError) as error:
        raise TraceInvalid("it is not whole") from error
    return found.start()


def _past(what: re.Pattern[str], text: str, at: int) -> int:
    found = what.match(text, at)
    if found is None:
        raise TraceInvalid("it is not whole")
    return found.end()


def main(asked: IO[str], answer: IO[str], niceness: int = _NICENESS) -> None:
    """``[{path, about}, …]`` → ``{files: [{path, size_bytes, sha256}, …]}`` in the same order, or
    ``{error: invalid | unwritable, message}``."""
    os.nice(niceness)
    try:
        packed = [pack(Path(one["path"]), one["about"]) for one in json.load(asked)]
        files = [
            {"path": str(one.path), "size_bytes": one.size_bytes, "sha256": one.sha256}
            for one in packed
        ]
        json.dump({"files": files}, answer)
    except OSError as error:
        json.dump({"error": "unwritable", "message": error.strerror or str(error)}, answer)
    except ValueError as error:
        json.dump({"error": "invalid", "message": str(error)}, answer)


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
