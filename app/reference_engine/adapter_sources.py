"""From where an engine takes adapters: what an order may name, checked before any rank reads."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.reference_engine.adapter_config import parse_adapter
from app.reference_engine.adapter_orders import AdapterSource
from app.reference_engine.config import ModelConfig
from app.reference_engine.errors import AdapterRefused, SourceRefused
from app.reference_engine.sources import real_path

_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_MAX_CONFIG_BYTES = 1 << 20
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPolicy:
    """``roots``: directories; none: no adapters. ``most``: how many may be loaded at once."""

    roots: tuple[Path, ...] = ()
    most: int = 8

    def find(
        self, path: str, model: ModelConfig, proceed: Callable[[], None] = lambda: None
    ) -> AdapterSource:
        """An adapter's folder in peft's layout. ``proceed`` is called now and then and may raise.

        Blocks on the file system. Raises AdapterRefused or SourceRefused.
        """
        folder = self._real(Path(path))
        if not folder.is_dir():
            raise AdapterRefused("an adapter is a folder")
        if (folder / _PICKLED).exists() and not (folder / _TENSORS).exists():
            raise AdapterRefused(f"{_PICKLED} is pickled and is never read: save it as {_TENSORS}")
        shape = parse_adapter(self._config(folder), model)
        tensors = self._file(folder, _TENSORS)
        digest = hashlib.sha256()
        with open(_opened(tensors), "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                proceed()
                digest.update(piece)
        return AdapterSource(
            path=str(tensors),
            sha256=digest.hexdigest(),
            rank=shape.rank,
            scale=shape.scale,
            modules=shape.modules,
        )

    def _config(self, folder: Path) -> dict[str, Any]:
        with open(_opened(self._file(folder, _CONFIG)), "rb") as file:
            content = file.read(_MAX_CONFIG_BYTES + 1)
        if len(content) > _MAX_CONFIG_BYTES:
            raise AdapterRefused(f"{_CONFIG} is larger than {_MAX_CONFIG_BYTES} bytes")
        try:
            raw = json.loads(content)
        except (ValueError, RecursionError):
            raise AdapterRefused(f"{_CONFIG} is not JSON") from None
        if not isinstance(raw, dict):
            raise AdapterRefused(f"{_CONFIG} is not a JSON object")
        return raw

    def _file(self, folder: Path, name: str) -> Path:
        # A link inside an allowed folder must not lead out of the roots.
        try:
            return self._real(folder / name)
        except SourceRefused:
            raise AdapterRefused(f"{name} is not there, or not below an allowed root") from None

    def _real(self, path: Path) -> Path:
        return real_path(path, self.roots)


def _opened(real: Path) -> int:
    """A descriptor of that very file: a link or a pipe put in its place since is refused."""
    try:
        fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise AdapterRefused(f"{real.name}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise AdapterRefused(f"{real.name} is not a regular file")
        if os.readlink(f"/proc/self/fd/{fd}") != str(real):
            raise AdapterRefused(f"{real.name}: a link leads elsewhere")
    except BaseException:
        os.close(fd)
        raise
    return fd
