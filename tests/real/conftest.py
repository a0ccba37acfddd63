"""The real model's folder, which `make test-real` makes."""

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / ".venv-real" / "smollm2"


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Return a folder of SmolLM2-135M-Instruct in bf16; SWARM_SMOLLM2 names another place."""
    folder = Path(os.environ.get("SWARM_SMOLLM2", FOLDER))
    if not folder.is_dir():
        pytest.skip(f"there is no model in {folder}; `make test-real` makes it (93 MB to download)")
    return folder
