"""A token issuer for development and demonstration. Never for anything real: it gives any token
it knows to whoever holds one per-run secret, and it serves loopback only."""
