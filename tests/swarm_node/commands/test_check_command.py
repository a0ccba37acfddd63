"""A file that somebody shows, and that proves nothing: what it is not is said in words."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ledger.proof import LedgerReceipt, Proven
from protocol.errors import MalformedMessage, ProofInvalid
from protocol.policy.root_document import fingerprint
from protocol.wire import canonical
from swarm_node.cli import app
from swarm_node.coordinator_api import last_round
from swarm_node.coordinator_api.join_string import parse

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


def test_a_damaged_proof_of_the_second_joined_round_is_not_only_blamed_for_the_first(tmp_path: Path) -> None:
    root, file = b"damaged", tmp_path / "shown"
    joins = [parse(JOIN_STRING), parse(f"http://127.0.0.1:10#{fingerprint(root)}")]
    last_round.record_joined(tmp_path, joins, "")
    entry = Proven(index=0, entry=b"entry", proof=())
    file.write_bytes(LedgerReceipt(roots=(root,), checkpoint=b"note", entries=(entry,)).to_bytes())
    found = CliRunner().invoke(app, ["ledger", "check", str(file), "--home", str(tmp_path)])
    assert isinstance(found.exception, ProofInvalid), found.exception
    first, second = str(found.exception).split("; ")
    assert first.startswith(f"{file} proves nothing about any of the 2 joined rounds: {joins[0].url}: The fingerprint")
    assert second.startswith(f"{joins[1].url}: The coordinator's trust metadata is not valid")


def test_an_error_that_is_the_same_for_each_joined_round_is_reported_once(tmp_path: Path) -> None:
    file = tmp_path / "shown"
    last_round.record_joined(tmp_path, [parse(JOIN_STRING), parse(f"http://127.0.0.1:10#{'b' * 64}")], "")
    file.write_bytes(canonical.encode({"kind": "echo-swarm/receipt"}))
    found = CliRunner().invoke(app, ["ledger", "check", str(file), "--home", str(tmp_path)])
    assert isinstance(found.exception, MalformedMessage), found.exception
