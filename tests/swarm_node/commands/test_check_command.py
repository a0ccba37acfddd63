"""A file that somebody shows, and that proves nothing: what it is not is said in words."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol.errors import ProofInvalid
from protocol.wire import canonical
from swarm_node.cli import app

JOIN_STRING = f"http://127.0.0.1:9#{'a' * 64}"


@pytest.mark.parametrize(
    "data",
    [b"", b"just a letter", canonical.encode({"kind": "echo-swarm/lease"}), canonical.encode([1])],
    ids=["empty", "text", "another message", "no message"],
)
def test_what_is_no_proof_is_called_none(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "shown"
    file.write_bytes(data)
    found = CliRunner().invoke(app, ["ledger", "check", JOIN_STRING, str(file)])
    assert isinstance(found.exception, ProofInvalid), found.exception
    assert f"{file} is not a receipt" in str(found.exception)
