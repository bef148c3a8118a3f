"""Judging bearer tokens: issuers, their keys, the verifier.

Free of web framework and database, so that an engine's own listeners judge tokens with the same
code as the gateway. Import from the modules; this package re-exports nothing.
"""
