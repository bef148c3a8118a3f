"""What can go wrong with the ledger itself."""

from __future__ import annotations

from app.domain.errors import Aborted, FailedPrecondition, Unavailable


class Superseded(Aborted):
    """The operation is no longer what the writer thought, or the writer's lease is gone.

    Nothing was written. Read the operation again and decide again.
    """

    reason = "SUPERSEDED"
    retryable = True


class LedgerUnavailable(Unavailable):
    """The database does not answer, or did not within its limit.

    Of a write that was under way it is not known whether it was committed.
    """

    reason = "LEDGER_UNAVAILABLE"


class LedgerBusy(LedgerUnavailable):
    """No connection came free within the limit. Nothing of what was asked for has been begun."""

    reason = "LEDGER_BUSY"


class LedgerNotWritable(LedgerUnavailable):
    """The database is there and takes no writes: its disk is full, or it is read-only."""

    reason = "LEDGER_NOT_WRITABLE"


class HistoryPruned(Aborted):
    """Events behind the position that was to be read on from are no longer kept."""

    reason = "HISTORY_PRUNED"


class LedgerInUse(FailedPrecondition):
    """Another process has this ledger open: SQLite serves one gateway, and a restored ledger must
    not meet one that remembers a later one."""

    reason = "LEDGER_IN_USE"


class SchemaBehind(FailedPrecondition):
    """The database has no schema yet or an older one: it must be upgraded first."""

    reason = "LEDGER_SCHEMA_BEHIND"


class SchemaAhead(FailedPrecondition):
    """The schema was written by a newer release than this one, which does not know it."""

    reason = "LEDGER_SCHEMA_AHEAD"


class UpgradeBusy(Unavailable):
    """Another process is upgrading the schema and has not finished within the limit."""

    reason = "LEDGER_UPGRADE_BUSY"
