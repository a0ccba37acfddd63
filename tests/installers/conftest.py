"""The machine that the tests of install.sh share."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.installers.machine import TOOLS, Machine
from tests.installers.small_agent import small_wheel

UV = """
# As `uv venv --seed --python PYTHON TARGET`, in a moment and without a network: pip is the tests' own.
while [ $# -gt 1 ]; do [ "$1" != --python ] || python=$2; shift; done
"$python" -m venv --without-pip "$1" && ln -s '{pip}' "$1"/lib/python3.*/site-packages/
"""


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
    pip = find_spec("pip")
    assert pip is not None
    assert pip.origin is not None
    plain_machine.put("uv", UV.format(pip=Path(pip.origin).parent))
    return plain_machine
