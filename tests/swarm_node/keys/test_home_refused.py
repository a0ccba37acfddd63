"""A home that takes no files: whose fault it is gets a name and a next step, and no command ends in a traceback."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol.errors import ConfigInvalid
from swarm_node.allowance import settings
from swarm_node.base.disk import DiskFailed
from swarm_node.cli import app
from swarm_node.coordinator_api import last_round
from swarm_node.keys import identity
from swarm_node.owner import control_socket

JOIN_STRING = f"http://127.0.0.1:9#{'a' * 64}"

AGENTS = pytest.mark.parametrize(
    "words", [("join", JOIN_STRING, "--quiet", "--engine", "torch"), ("mirror", JOIN_STRING, "--quiet")], ids=" ".join
)


def refusal(*words: str) -> DiskFailed:
    found = CliRunner().invoke(app, [*words])
    assert isinstance(found.exception, DiskFailed), found.exception
    return found.exception


@pytest.fixture
def home_with_key(tmp_path: Path) -> Path:
    """A home that was used before, and whose agent's lock nobody may open any more: a folder, so not even root."""
    home = tmp_path / "home"
    identity.load_or_create(home / identity.FILE)
    (home / "agent.lock").mkdir()
    return home


@AGENTS
def test_a_lock_that_cannot_be_opened_is_named(words: tuple[str, ...], home_with_key: Path) -> None:
    assert f"Disk error in {home_with_key}" in str(refusal(*words, "--home", str(home_with_key)))


@AGENTS
def test_a_closed_home_is_said_to_be_closed(words: tuple[str, ...], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("root may write into a closed folder")
    said = str(refusal(*words, "--home", str(tmp_path)))
    assert f"Cannot write to {tmp_path}" in said
    assert "--home" in said


@pytest.mark.parametrize("words", [("join", JOIN_STRING), ("mirror", JOIN_STRING), ("limits", "--upload-gb", "4")])
def test_a_home_below_a_file_is_named(words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    said = str(refusal(*words, "--home", str(file / "home")))
    assert f"Disk error in {file / 'home'} (Not a directory)" in said
    assert "again" not in said, "a command that ends tries nothing again"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (identity.FILE, ("keys", "show")),
        (last_round.FILE, ("earnings",)),
        (settings.FILE, ("limits",)),
    ],
)
def test_a_file_that_this_user_cannot_read_is_named(file: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """A file of root, after `sudo swarm-node` for example; here a folder, which even root cannot read."""
    (tmp_path / file).mkdir()
    found = CliRunner().invoke(app, [*words, "--home", str(tmp_path)])
    assert isinstance(found.exception, ConfigInvalid), found.exception
    assert f"{tmp_path / file} cannot be read: Is a directory." in str(found.exception)
    assert "Run the command as the user who owns this file" in str(found.exception)


@pytest.mark.trio
async def test_a_home_without_room_for_the_control_socket_is_named(tmp_path: Path) -> None:
    (tmp_path / control_socket.FOLDER).touch()
    with pytest.raises(DiskFailed, match="Disk error in "):
        await control_socket.open_door(tmp_path)
