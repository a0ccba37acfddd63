"""The machine that the tests of install.sh share."""

from pathlib import Path

import pytest

from tests.installers.machine import Machine, make_machine, quick_uv


@pytest.fixture
def plain_machine(tmp_path: Path) -> Machine:
    """A machine whose environments are made by venv, which takes three seconds of processor time for each."""
    return make_machine(tmp_path)


@pytest.fixture
def machine(plain_machine: Machine) -> Machine:
    """A machine with a program named uv, which makes an environment in a moment."""
    plain_machine.put("uv", quick_uv())
    return plain_machine
