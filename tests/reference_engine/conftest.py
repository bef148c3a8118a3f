from __future__ import annotations

from pathlib import Path

import pytest

from app.reference_engine.tiny_model import ensure_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that an engine makes for itself. Not to be written to."""
    return ensure_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), 0)
