"""The SQL ledger: operations, events, idempotency keys, engines, leases, audit."""
