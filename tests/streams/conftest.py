from __future__ import annotations

from tests.http.conftest import gate, logged

__all__ = ["gate", "logged"]
