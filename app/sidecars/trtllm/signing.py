"""Signatures of calls to TensorRT-LLM's runtime control: HMAC-SHA256, by its published schemes.

`REQUEST` is that of the server's newest source (`serve/runtime_control_auth.py`): it covers the
method, the path, the time and a number used once, and the server takes each such number once within
the 300 s that a signature is good for. `BODY` is that of its documentation, and of servers before:
it covers the body alone, so that whoever sees one call can make it again.

A signature is made for one call. Nothing here keeps one: a call that is made again is signed again.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from enum import StrEnum

AUTH = "x-trtllm-runtime-control-auth"
TIMESTAMP = "x-trtllm-runtime-control-timestamp"
NONCE = "x-trtllm-runtime-control-nonce"
_DOMAIN = b"trtllm-runtime-control-v1"
_FEWEST_CHARS = 16


class Scheme(StrEnum):
    REQUEST = "request"
    BODY = "body"


def unix_now() -> int:
    return int(time.time())


def random_nonce() -> str:
    """32 lower-case hexadecimal digits, which is the only form that is taken."""
    return secrets.token_hex(16)


class Signer:
    """`key`: the text of TRTLLM_RUNTIME_CONTROL_API_KEY. `now` in Unix seconds: the server refuses
    what is more than 300 s away from its own clock. `new_nonce`: never the same twice."""

    def __init__(
        self,
        key: str,
        scheme: Scheme = Scheme.REQUEST,
        *,
        now: Callable[[], int] = unix_now,
        new_nonce: Callable[[], str] = random_nonce,
    ) -> None:
        """Raises ValueError for a key that is too short to be a secret."""
        if len(key) < _FEWEST_CHARS:
            raise ValueError(f"a key is {_FEWEST_CHARS} characters or more")
        self._key = key.encode()
        self._scheme = scheme
        self._now = now
        self._new_nonce = new_nonce

    def headers(self, method: str, path: str, body: bytes) -> Mapping[str, str]:
        """For exactly this body, which is empty where there is none. The path has no query: the
        scheme leaves it out, and the server takes none."""
        if self._scheme is Scheme.BODY:
            return {AUTH: self._signature(body)}
        timestamp, nonce = str(self._now()), self._new_nonce()
        signed = canonical(method, path, timestamp, nonce, body)
        return {AUTH: self._signature(signed), TIMESTAMP: timestamp, NONCE: nonce}

    def _signature(self, signed: bytes) -> str:
        return f"sha256={hmac.new(self._key, signed, hashlib.sha256).hexdigest()}"


def canonical(method: str, path: str, timestamp: str, nonce: str, body: bytes) -> bytes:
    """What is signed: five lines that each end with a line feed, then the body as it is."""
    lines = (_DOMAIN, method.upper().encode(), path.encode(), timestamp.encode(), nonce.encode())
    return b"".join(line + b"\n" for line in lines) + body
