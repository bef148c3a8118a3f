"""Logging in to a gateway from a terminal, and what is kept of it."""
