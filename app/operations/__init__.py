"""Use cases: submit, run, cancel, reconcile. Neither FastAPI nor gRPC here."""
