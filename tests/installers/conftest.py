"""The machine that the tests of install.sh share."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.installers.machine import TOOLS, Machine, quick_uv
from tests.installers.small_agent import small_wheel


@pytest.fixture
def plain_machine(tmp_path: Path) -> Machine:
    """A machine whose environments are made by venv, which takes three seconds of processor time for each."""
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


@pytest.fixture
def machine(plain_machine: Machine) -> Machine:
    """The same, with a program named uv, which makes an environment in a moment."""
    plain_machine.put("uv", quick_uv())
    return plain_machine
