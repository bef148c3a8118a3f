"""Callers of the compatible endpoints that can't send a token, and what proves them instead.

Trainers and controllers that were made for an engine's own HTTP call it without any credential. So
the connection proves them: a socket of this machine, a secret in the address, a certificate. There
is no such caller anywhere but below the compatible endpoints, and none without a proof.
"""
