"""A home that takes no files: whose fault it is gets a name and a next step, and no command ends in a traceback."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_node.base.disk import DiskFailed
from swarm_node.cli import app
from swarm_node.keys import identity

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
