"""Use cases: submit, run, cancel, reconcile. Domain, ledger and the backend port; no FastAPI, no gRPC."""
