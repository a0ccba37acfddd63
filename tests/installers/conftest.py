"""The machine that the tests of install.sh share."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.installers.machine import TOOLS, Machine
from tests.installers.small_agent import small_wheel


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, name
        (tools / name).symlink_to(found)
    (tools / "python3").symlink_to(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info[1]}")
    home = tmp_path / "home"
    home.mkdir()
    small_wheel(tmp_path / "wheels", "1.0")
    return Machine(home, tmp_path / "wheels", tools)
