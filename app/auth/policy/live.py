"""The policy in force, read anew while the gateway runs."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from app.auth.policy.reading import MAX_BYTES, Fault, PolicyRefused, read_policy
from app.auth.policy.rules import Permit, Policy
from app.auth.principal import Principal

Outcome = Literal["loaded", "refused", "unchanged"]


class LivePolicy:
    """What the file said when it last was whole. `path` None: there is no policy.

    Whether it has changed is asked of its content: the times of a file say nothing certain, and a
    replaced one may have the times of the old.
    """

    def __init__(
        self,
        path: Path | None,
        issuers: Mapping[str, bool] | None = None,
        *,
        settle_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Reads the file. `issuers`: as `read_policy`. `settle_s`: how long a new content has to
        stay what it is before it counts. Raises PolicyRefused."""
        self._path = path
        self._settle_s = settle_s
        self._sleep = sleep
        self._issuers = issuers
        self._seen: bytes | None = None
        self.policy: Policy | None = None
        self.faults: tuple[Fault, ...] = ()
        """Of the file as it is now; empty: it is the policy in force."""
        if path is not None:
            self.policy = self._read(path)

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def sha256(self) -> str | None:
        """Of the file as it was last read, whole or not; None: it could not be."""
        return None if self._seen is None else self._seen.hex()

    def permit(self, caller: Principal) -> Permit:
        permit = Permit(caller) if self.policy is None else self.policy.permit(caller)
        return permit.within(caller.engines)

    def look(self) -> Outcome:
        """Read the file again. One with a fault, or none, changes nothing: what was in force stays
        so, and `faults` says why. Blocks for as long as the disk takes, and `settle_s`."""
        if self._path is None:
            return "unchanged"
        seen, faults = self._seen, self.faults
        try:
            if self._is_being_written(self._path):
                return "unchanged"  # looked at again the next time
            policy = self._read(self._path)
        except PolicyRefused as refused:
            self.faults = refused.faults
            return "unchanged" if self._seen == seen and refused.faults == faults else "refused"
        if self._seen == seen and not faults:
            return "unchanged"
        self.faults = ()
        self.policy = policy
        return "loaded"

    def _is_being_written(self, path: Path) -> bool:
        """Half of a file may be a policy too: one whose rules are for more callers, and engines,
        than they are when all is there."""
        content = self._content(path)
        if self._settle_s <= 0 or hashlib.sha256(content).digest() == self._seen:
            return False
        self._sleep(self._settle_s)
        return self._content(path) != content

    def _read(self, path: Path) -> Policy:
        """Raises PolicyRefused."""
        content = self._content(path)
        digest = hashlib.sha256(content).digest()
        if digest == self._seen and self.policy is not None and not self.faults:
            return self.policy
        self._seen = digest
        return read_policy(content, self._issuers)

    def _content(self, path: Path) -> bytes:
        """Raises PolicyRefused."""
        try:
            with open(path, "rb", opener=_at_once) as file:
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return file.read(MAX_BYTES + 1)
        except OSError as error:
            self._seen = None
            raise PolicyRefused([Fault("file", f"can't be read: {error.strerror}")]) from None
        self._seen = None
        raise PolicyRefused([Fault("file", "is no file but something else")])


def _at_once(path: str, flags: int) -> int:
    """A pipe in the file's place must not keep whoever looks until somebody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)
