"""People who log in with a browser: the login at their issuer, and the session that follows.

The browser gets the id of a session and nothing else. Tokens stay here, sealed in the ledger.
"""
