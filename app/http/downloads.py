"""A file as an answer: all of it from one descriptor, which is closed however the answer ends."""

from __future__ import annotations

import asyncio
import base64
import re

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.operations.artifacts import Artifact, OpenFile

_UNKNOWN = "application/octet-stream"
MEDIA_TYPES = (_UNKNOWN, "application/gzip", "application/json", "application/zip")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


class FileReply(Response):
    """`send_timeout_s`: how long the caller may take for each piece."""

    def __init__(
        self, artifact: Artifact, file: OpenFile, name: str, *, send_timeout_s: float
    ) -> None:
        super().__init__(headers=_headers(artifact, name))
        self._file = file
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            if scope["method"] != "HEAD":
                async for piece in self._file.pieces():
                    async with asyncio.timeout(self._send_timeout_s):
                        body = {"type": "http.response.body", "body": piece, "more_body": True}
                        await send(body)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._file.close()


def _headers(artifact: Artifact, name: str) -> dict[str, str]:
    # An engine's word for it is no reason to have a browser show it.
    kind = artifact.media_type if artifact.media_type in MEDIA_TYPES else _UNKNOWN
    digest = base64.b64encode(bytes.fromhex(artifact.sha256)).decode()
    return {
        "content-type": kind,
        "content-length": str(artifact.size_bytes),
        "content-disposition": f'attachment; filename="{_NOT_IN_NAMES.sub("_", name)}"',
        "repr-digest": f"sha-256=:{digest}:",
        "x-content-type-options": "nosniff",
        "cache-control": "private, no-store",
    }
