"""The SQL ledger: operations, events, idempotency keys, engines, leases, audit."""

from app.ledger.ledger import Ledger
from app.ledger.schema import check, upgrade

__all__ = ["Ledger", "check", "upgrade"]
