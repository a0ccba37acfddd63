"""A round is opened by one coordinator, in a folder that can be written."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config import parse
from coordinator.service import opening
from protocol.errors import ConfigInvalid


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = tmp_path / "file" / "round"
    refused = f"The folder {folder} cannot be written"
    with pytest.raises(ConfigInvalid, match=refused):
        opening.only_coordinator(folder)
    with pytest.raises(ConfigInvalid, match=refused):
        opening.lead(parse({"round": {"directory": str(folder)}}))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_demo_in_such_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    ended = CliRunner().invoke(app, ["demo", "examples/demo.toml", "--directory", str(tmp_path / "file" / "demo")])
    assert isinstance(ended.exception, ConfigInvalid)
