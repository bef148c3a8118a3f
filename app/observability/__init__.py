"""Logs, metrics and audit records."""
