"""Commands about a node that is not there say so, and make none: a mistyped home stays empty."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol.errors import ConfigInvalid
from swarm_node.cli import app

JOIN_STRING = f"http://127.0.0.1:9#{'a' * 64}"


@pytest.mark.parametrize(
    "words",
    [
        ("why", JOIN_STRING),
        ("earnings", JOIN_STRING),
        ("appeal", JOIN_STRING, "4" * 32),
        ("keys", "show"),
        ("keys", "rotate"),
        ("keys", "backup", "/nowhere/node.key"),
    ],
    ids=" ".join,
)
def test_a_mistyped_home_is_named_and_gets_no_key(tmp_path: Path, words: tuple[str, ...]) -> None:
    home = tmp_path / "mistyped"
    found = CliRunner().invoke(app, [*words, "--home", str(home)])
    assert isinstance(found.exception, ConfigInvalid)
    assert f"There is no node in {home}" in str(found.exception)
    assert not home.exists()
