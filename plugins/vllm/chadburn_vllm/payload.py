"""What callers send. This is a contract: fields are only ever added, each with a default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SHA256 = re.compile("[0-9a-f]{64}")


class Refused(ValueError):
    """An update that is not carried out; the model has not been touched, and the text says so. vLLM
    hands on the text alone, so that is what a caller can tell it by."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why} (weights unchanged)")
        self.why = why


@dataclass(frozen=True)
class Update:
    """`update_info`: which checkpoint, and what has to hold of it before it is used."""

    path: str
    """A safetensors file, or a folder of them; absolute, as each rank's machine sees it."""
    files: Mapping[str, str] | None = None
    """SHA-256 in lower-case hex of every file that is read, by its name without a folder."""
    check_finite: bool = False
    """Whether every element of every floating-point tensor is looked at for NaN and infinity."""


def read_init(given: Mapping[str, object]) -> None:
    """`init_info` has nothing in it: what may be read is the operator's to say, no caller's."""
    _no_others(given, (), "init_info")


def read_update(given: Mapping[str, object]) -> Update:
    """Raises: Refused, on anything that is not exactly an update_info."""
    _no_others(given, ("path", "files", "check_finite"), "update_info")
    path = given.get("path")
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise Refused("update_info.path must be an absolute path")
    check_finite = given.get("check_finite", False)
    if not isinstance(check_finite, bool):
        raise Refused("update_info.check_finite must be true or false")
    return Update(path, _digests(given.get("files")), check_finite)


def _digests(given: object) -> Mapping[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or not given:
        raise Refused("update_info.files must be an object of file names and their SHA-256")
    digests = {}
    for name, digest in given.items():
        if not isinstance(name, str) or not is_file_name(name):
            raise Refused("update_info.files: each name is a file's, without a folder")
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise Refused(f"update_info.files: {name!r} needs 64 lower-case hex digits")
        digests[name] = digest
    return digests


def is_file_name(name: str) -> bool:
    """Whether this names a safetensors file in a folder, and nothing outside of it."""
    return name.endswith(".safetensors") and "/" not in name and "\0" not in name


def _no_others(given: Mapping[str, object], known: tuple[str, ...], what: str) -> None:
    if others := sorted(set(given) - set(known)):
        raise Refused(f"{what} has unknown fields: {', '.join(map(repr, others))}")
