"""What a proof of possession has to repeat where its issuer's settings want that (RFC 9449 section
9), so that none can be made long before it is shown. Nothing is kept: a nonce says by itself when
it was given out, and all who have the key can tell."""

import base64
import hmac
from collections.abc import Callable
from datetime import datetime

from app.auth.tokens.errors import NonceNeeded

EVERY_S = 300
"""How long a nonce is the one that is given out. It is taken for as long again, and from a gateway
whose clock is ahead."""
_MARK_BYTES = 16


class Nonces:
    def __init__(self, key: bytes, now: Callable[[], datetime]) -> None:
        """`key`: 32 bytes, the same at all gateways that one caller may come to."""
        self._key = key
        self._now = now

    def require(self, shown: object) -> None:
        """Raises NonceNeeded, which brings a good one along."""
        number = int(self._now().timestamp()) // EVERY_S
        good = [self._nonce(number + apart) for apart in (0, -1, 1)]
        text = shown if isinstance(shown, str) else ""
        # All are compared, whichever fits.
        if not sum([hmac.compare_digest(one.encode(), text.encode()) for one in good]):
            raise NonceNeeded(good[0])

    def _nonce(self, number: int) -> str:
        mark = hmac.digest(self._key, f"dpop nonce {number}".encode(), "sha256")
        return base64.urlsafe_b64encode(mark[:_MARK_BYTES]).rstrip(b"=").decode()
