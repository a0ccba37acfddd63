"""The owner's delegation to a node, as `join --owner` reads it."""

from pathlib import Path

import pytest

from protocol.errors import ConfigInvalid
from protocol.wire.signing import NodeKey
from swarm_node.keys import delegation

NODE = NodeKey(bytes(32)).node_id


def test_a_file_that_is_missing_is_not_called_a_wrong_delegation(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        delegation.kept(tmp_path, NODE, tmp_path / "nofile")
    assert refused.value.message == f"--owner: {tmp_path / 'nofile'} cannot be read: No such file or directory."


def test_a_file_with_something_else_is_no_delegation(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"something else")
    with pytest.raises(ConfigInvalid, match=f"is not a delegation to {NODE}"):
        delegation.kept(tmp_path, NODE, tmp_path / "key")
