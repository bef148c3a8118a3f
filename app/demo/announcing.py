"""Telling the world that a demo answers, and with which tokens."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.demo.folder import Folder, check_writable, write_json, write_private
from app.demo.plan import TOKEN_TTL_S, DemoRefused
from app.demo.tokens import TokenRefused, fetch_tokens

RENEW_S = TOKEN_TTL_S / 3
RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Everything that answers now; `tokens` by role. `next_weights`: a folder with other weights
    for the engine's model."""

    base_url: str
    issuer: str
    engine: str
    inference_address: str
    admin_address: str
    next_weights: str | None = None
    tokens: Mapping[str, str] = field(repr=False)
    secret: str = field(repr=False)
    folder: Folder

    def document(self) -> dict[str, Any]:
        """The ready file."""
        return {
            "base_url": self.base_url,
            "issuer": self.issuer,
            "engine": self.engine,
            "inference_address": self.inference_address,
            "admin_address": self.admin_address,
            "next_weights": self.next_weights,
            "tokens": dict(self.tokens),
            "data_dir": str(self.folder.path.absolute()),
        }


@dataclass(frozen=True, slots=True)
class ReadyFiles:
    """One in the demo's folder, where other commands look, and one where it was asked for."""

    folder: Folder
    elsewhere: Path | None

    @property
    def paths(self) -> list[Path]:
        return [self.folder.ready_file, *([self.elsewhere] if self.elsewhere else [])]

    def forget(self) -> None:
        """A demo that was killed leaves them behind; who waits for ours must not read those.

        Raises FolderRefused or DemoRefused for a place that cannot be written, before anything
        has been started.
        """
        for path in self.paths:
            check_writable(path.parent)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise DemoRefused(f"{path} cannot be replaced: {error.strerror}") from error

    def write(self, running: Running, tokens: Mapping[str, str]) -> None:
        """Raises OSError."""
        header = f"Authorization: Bearer {tokens['operator']}\n"
        write_private(self.folder.operator_header, header)
        for path in self.paths:
            write_json(path, {**running.document(), "tokens": dict(tokens)})

    def remove(self) -> None:
        """What would no longer be true, and the secret that would no longer be needed."""
        for path in (*self.paths, self.folder.operator_header, self.folder.issuer_secret):
            with contextlib.suppress(OSError):
                os.unlink(path)


@contextlib.asynccontextmanager
async def announced(
    running: Running, files: ReadyFiles, *, renew_s: float = RENEW_S, retry_s: float = RETRY_S
) -> AsyncIterator[Callable[[str], str]]:
    """Ready files while the block runs, with tokens that are renewed long before they expire.

    Gives the present token of a role. Raises OSError where a file cannot be written at first.
    """
    tokens = dict(running.tokens)

    async def renew() -> None:
        wait_s = renew_s
        while True:
            await asyncio.sleep(wait_s)
            try:
                tokens.update(await fetch_tokens(running.issuer, running.secret))
                files.write(running, tokens)
                wait_s = renew_s
            except (TokenRefused, OSError):
                wait_s = retry_s  # those there are still good for hours

    files.write(running, tokens)
    renewing = asyncio.create_task(renew(), name="renew-tokens")
    try:
        yield lambda role: tokens[role]
    finally:
        renewing.cancel()
        files.remove()
