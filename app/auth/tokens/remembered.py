"""Tokens verified a moment ago, so that a busy caller costs one signature check a minute."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from app.auth.tokens.claims import Judged


@dataclass(frozen=True, slots=True)
class _Entry:
    judged: Judged
    generation: int | None
    until_monotonic_s: float


class RememberedTokens:
    """Bounded, least recently used first out; keyed by digest so that it holds no tokens."""

    def __init__(self, *, size: int, ttl_s: float) -> None:
        self._size = size
        self._ttl_s = ttl_s
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def get(
        self, token: str, *, now_s: float, monotonic_s: float
    ) -> tuple[Judged, int | None] | None:
        """What came of the token, and the key generation it was verified under (None: no key
        vouched for it), if still usable.

        Two clocks: the lifetime of the entry runs on the monotonic one, which nobody can set
        back, and the token's own expiry (without leeway) on the wall clock ``now_s``.
        """
        digest = _digest(token)
        entry = self._entries.get(digest)
        if entry is None:
            return None
        if monotonic_s >= entry.until_monotonic_s or (
            now_s >= entry.judged.principal.expires_at.timestamp()
        ):
            del self._entries[digest]
            return None
        self._entries.move_to_end(digest)
        return entry.judged, entry.generation

    def put(
        self,
        token: str,
        judged: Judged,
        generation: int | None,
        *,
        monotonic_s: float,
        ttl_s: float | None = None,
    ) -> None:
        """Remember a token that has just been found good, for ``ttl_s`` where given."""
        digest = _digest(token)
        until_s = monotonic_s + (self._ttl_s if ttl_s is None else ttl_s)
        self._entries[digest] = _Entry(judged, generation, until_s)
        self._entries.move_to_end(digest)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def forget(self, token: str) -> None:
        self._entries.pop(_digest(token), None)

    def __len__(self) -> int:
        return len(self._entries)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("ascii")).digest()
