"""Keeping secrets in places that others may read: the ledger's rows, and a browser's cookie."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
_FORMAT = b"\x01"
_ID_BYTES = 8
_NONCE_BYTES = 12


class Unsealable(Exception):
    """Not sealed by any key there is, or for another purpose."""


class SealingKeys:
    """AES-256-GCM under the first of the keys; what any of them has sealed can be read.

    Of a sealed text only its length shows. `purpose` binds it to the place that it was made for, so
    that nobody who writes there can move one to another. A random nonce of 96 bits serves some 2^32
    texts for a key (NIST SP 800-38D, 8.3); a session takes one for each refresh.
    """

    def __init__(self, keys: Sequence[bytes], random: Callable[[int], bytes]) -> None:
        """ValueError: there is none, one twice, or one of another length than `KEY_BYTES`."""
        if not keys or any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"keys have {KEY_BYTES} bytes, and one at least is needed")
        self._ciphers = {_id_of(key): AESGCM(key) for key in keys}
        if len(self._ciphers) != len(keys):
            raise ValueError("a key is there twice")
        self._first = _id_of(keys[0])
        self._random = random

    def seal(self, document: Mapping[str, Any], purpose: str) -> bytes:
        nonce = self._random(_NONCE_BYTES)
        plain = json.dumps(document, separators=(",", ":")).encode()
        head = _FORMAT + self._first
        return (
            head + nonce + self._ciphers[self._first].encrypt(nonce, plain, _bound(head, purpose))
        )

    def unseal(self, sealed: bytes, purpose: str) -> dict[str, Any]:
        """Raises Unsealable."""
        head, rest = sealed[: 1 + _ID_BYTES], sealed[1 + _ID_BYTES :]
        cipher = self._ciphers.get(head[1:])
        if head[:1] != _FORMAT or cipher is None or len(rest) <= _NONCE_BYTES:
            raise Unsealable
        nonce, text = rest[:_NONCE_BYTES], rest[_NONCE_BYTES:]
        try:
            document: dict[str, Any] = json.loads(
                cipher.decrypt(nonce, text, _bound(head, purpose))
            )
        except InvalidTag as error:
            raise Unsealable from error
        return document


def read_key(text: str) -> bytes:
    """The key in a file's text: base64, in either alphabet, of `KEY_BYTES`. ValueError without a
    word of what it is."""
    try:
        key = base64.b64decode(text.strip().replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("is not base64") from None
    if len(key) != KEY_BYTES:
        raise ValueError(f"must hold {KEY_BYTES} bytes in base64 (openssl rand -base64 32)")
    return key


def digest_of(secret: str) -> str:
    """What is stored of a secret of full strength, which needs no salt."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _id_of(key: bytes) -> bytes:
    return hashlib.sha256(b"chadburn session key\x00" + key).digest()[:_ID_BYTES]


def _bound(head: bytes, purpose: str) -> bytes:
    return head + purpose.encode()
