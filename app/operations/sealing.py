"""The audit is sealed in the background, by one of all gateways on the ledger."""

from __future__ import annotations

import asyncio
import logging

from app.ledger.ledger import Ledger
from app.ledger.sealing import DUTY, ROWS_AT_ONCE, DutyLost
from app.ledger.values import Duty, Seal

log = logging.getLogger(__name__)

_PAUSE_S = 0.05
"""Between two seals while there is more, so that writers on SQLite come in between."""
_GRACE_S = 30.0
_END_S = 5.0


class Sealer:
    """`every_s`: how long a row is without a seal, about; `owner`: for people who look who it is.

    Whoever dies with the duty has it for `every_s` and half a minute more; then another one goes on
    where the last seal ended.
    """

    def __init__(self, ledger: Ledger, owner: str, every_s: float) -> None:
        self._ledger = ledger
        self._owner = owner
        self._every_s = every_s
        self._ttl_s = every_s + _GRACE_S
        self._duty: Duty | None = None
        self._last: Seal | None = None

    async def run(self) -> None:
        """Now and every `every_s`, until cancelled."""
        while True:
            try:
                await self.round()
            except Exception as failed:
                # Whatever it is, it is tried again: what is not sealed now is sealed then. The last
                # seal may have come about unheard.
                self._last = None
                log.warning("the audit is not sealed until the next time: %r", failed)
            await asyncio.sleep(self._every_s)

    async def round(self) -> int:
        """Seal what there is, if nobody else does; how many rows that was."""
        if self._duty is None:
            self._duty = await self._ledger.duties.take(DUTY, self._owner, self._ttl_s)
            self._last = None
        rows = 0
        while self._duty is not None:
            try:
                seal, self._duty = await self._ledger.sealing.seal(self._duty, self._ttl_s)
            except DutyLost:
                self._duty = None
                break
            if seal is None:
                break
            self._tell(seal)
            rows += seal.row_count
            if seal.row_count < ROWS_AT_ONCE:
                break
            await asyncio.sleep(_PAUSE_S)
        return rows

    async def stop(self, within_s: float = _END_S) -> None:
        """Seal the rest and let another one do it from now on. What is not sealed by then is later,
        by whoever comes next."""
        try:
            async with asyncio.timeout(within_s):
                await self.round()
                if self._duty is not None:
                    await self._ledger.duties.give_back(self._duty)
        except Exception as failed:
            log.warning("the end of the audit is left to be sealed by another gateway: %r", failed)

    def _tell(self, seal: Seal) -> None:
        if self._last is not None and seal.previous != self._last.digest:
            # Under this duty nobody else makes seals.
            log.error("the last seal of the audit is not the one that was made: verify the audit")
        self._last = seal
        log.info("audit sealed to %d: seal %d is %s", seal.to_id, seal.number, seal.digest)
