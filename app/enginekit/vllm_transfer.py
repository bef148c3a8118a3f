"""A weight transfer as `vllm.Control` has it, in steps, gathered into one order of the engine's.

The payload is that of the plugin for vLLM (plugins/vllm/README.md).
"""

from __future__ import annotations

import json
from typing import Any

from app.domain.commands import UnderPause, UpdateWeights
from app.domain.errors import FailedPrecondition, InvalidArgument
from app.domain.kinds import CachePolicy
from app.domain.weight_sources import DiskWeights, FileDigest


class NoWeightUpdate(FailedPrecondition):
    reason = "NO_WEIGHT_UPDATE"


class WeightUpdateOpen(FailedPrecondition):
    reason = "WEIGHT_UPDATE_OPEN"


class DiskTransfer:
    """Start, any number of payloads of which the last one counts, finish. A payload that can't be
    read closes the update, as in vLLM."""

    def __init__(self) -> None:
        self._open = False
        self._received: tuple[DiskWeights, bool] | None = None

    def init(self, info_json: bytes) -> None:
        """Raises InvalidArgument."""
        if _object(info_json, "init_info_json"):
            raise InvalidArgument("init_info_json: the backend disk takes an empty object")

    def start(self) -> None:
        if self._open:
            raise WeightUpdateOpen("a weight update is open already: finish it first")
        self._open, self._received = True, None

    def receive(self, info_json: bytes) -> None:
        """Raises InvalidArgument."""
        info = _object(info_json, "update_info_json")
        if not self._open:
            raise NoWeightUpdate("start a weight update first")
        try:
            self._received = _read(info)
        except InvalidArgument:
            self._open = False
            raise

    def finish(self, version: str) -> UpdateWeights | None:
        """What is to be carried out; None: nothing was received. Closes the update either way."""
        if not self._open:
            raise NoWeightUpdate("start a weight update first")
        received, self._open, self._received = self._received, False, None
        if received is None:
            return None
        source, check_finite = received
        return UpdateWeights(
            source=source,
            weight_version=version,
            cache_policy=CachePolicy.FLUSH,
            admission=UnderPause(),
            check_finite=check_finite,
        )


def _object(text: bytes, field: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        raise InvalidArgument(f"{field}: must be JSON") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"{field}: must be a JSON object")
    return found


def _read(info: dict[str, Any]) -> tuple[DiskWeights, bool]:
    path, files = info.get("path"), info.get("files")
    finite = info.get("check_finite", False)
    unknown = set(info) - {"path", "files", "check_finite"}
    named = files is None or (
        isinstance(files, dict) and all(isinstance(each, str) for each in files.values())
    )
    if unknown or not isinstance(path, str) or not named or not isinstance(finite, bool):
        raise InvalidArgument("update_info_json: path, and perhaps files and check_finite")
    digests = tuple(FileDigest(name, sha256) for name, sha256 in (files or {}).items())
    return DiskWeights(path=path, digests=digests), finite
