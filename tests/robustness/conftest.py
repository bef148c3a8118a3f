from __future__ import annotations

from pathlib import Path

import pytest

from app.reference_engine.tiny_model import ensure_tiny_checkpoint


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one shape, by the names that their weights get."""
    folder = tmp_path_factory.mktemp("versions")
    return {f"v{seed}": ensure_tiny_checkpoint(folder, seed) for seed in range(2)}
