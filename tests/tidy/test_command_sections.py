"""`--help` lists every command of both programs once, under the task that it is for."""

import subprocess
import sys

import pytest

from coordinator.cli import LAZY
from coordinator.cli import SECTIONS as COORDINATOR
from swarm_node.commands.options import SECTIONS as NODE
from tests.tidy.reference import program

SECTIONS = {"swarm-coordinator": COORDINATOR, "swarm-node": NODE}
LINE_MAX_CHARS = 80
"""The width of a terminal; longer lines are broken."""

HEAVY = ("pydantic", "sqlalchemy", "httpx", "aiohttp", "asyncio", "torch", "numpy")
LIST_MODULES = "import sys; from coordinator.cli import app; print(*sys.modules)"


@pytest.mark.parametrize("name", SECTIONS)
def test_every_command_that_is_not_hidden_is_in_one_section(name: str) -> None:
    listed = [command for commands in SECTIONS[name].values() for command in commands]
    assert len(listed) == len(set(listed))
    assert {each for each, command in program(name).commands.items() if not command.hidden} == set(listed)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_line_of_the_list_fits_a_terminal_and_ends(name: str) -> None:
    lines = [line for commands in SECTIONS[name].values() for line in commands.values()]
    assert not [line for line in lines if not line.endswith(".")]
    assert not [line for line in lines if len(line) > LINE_MAX_CHARS]


def test_the_list_of_commands_imports_no_command_and_no_model() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", LIST_MODULES], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & set(HEAVY)
    assert {module for module in loaded if module.startswith("coordinator.commands.")} == {
        "coordinator.commands.options"
    }


def test_every_lazy_command_can_be_loaded() -> None:
    for name, entry in LAZY.items():
        assert entry.load(name).name == name
