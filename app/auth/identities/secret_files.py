"""Secrets that stand in the path of an address, in a file of their own, one a line."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_SECRET = re.compile(r"[A-Za-z0-9_-]{32,256}")
_LEAST_SIGNS = 8
"""Different ones. Fewer, of 32 and more at random, hardly ever happen."""
_MOST = 16
_MAX_BYTES = 16 * 1024


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


@dataclass(frozen=True, slots=True)
class SecretFile:
    """Read whenever a secret is shown, so that a replaced file counts at once, and of it only
    hashes are kept for as long as that takes. Several lines: an old secret beside its successor."""

    path: Path

    def digests(self) -> tuple[bytes, ...]:
        """Raises ValueError with a reason that does not quote the file."""
        try:
            with open(self.path, "rb", opener=_at_once) as file:
                content = file.read(_MAX_BYTES + 1)
            lines = content.decode("ascii").split()
        except OSError as error:
            raise ValueError(f"cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError("has other signs than letters, digits, - and _") from None
        if len(content) > _MAX_BYTES or not 1 <= len(lines) <= _MOST:
            raise ValueError(f"takes 1 to {_MOST} secrets, one a line")
        for line in lines:
            if not _SECRET.fullmatch(line) or len(set(line)) < _LEAST_SIGNS:
                raise ValueError(
                    "a secret has 32 to 256 letters, digits, - and _ (openssl rand -hex 32)"
                )
        return tuple(digest_of(line) for line in lines)

    def has(self, digest: bytes) -> bool:
        """Whether a secret with this digest is in the file now. A file that can't be read, or is
        none any more, has none."""
        try:
            digests = self.digests()
        except ValueError as error:
            log.warning("secret_file %s: %s", self.path, error)
            return False
        # Not `any`, which stops at the first.
        return sum([hmac.compare_digest(one, digest) for one in digests]) > 0


def _at_once(path: str, flags: int) -> int:
    """A pipe in the file's place must not keep the gateway until somebody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)
