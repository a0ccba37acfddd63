"""A rotation that keeps the history, interrupted at its worst moment and done again."""

from pathlib import Path

import pytest

from protocol.errors import ConfigInvalid
from protocol.people.owner import Delegation, seal_statement
from protocol.wire.signing import NodeKey
from swarm_node.base.disk import DiskFailed
from swarm_node.keys import delegation, identity


def test_a_rotation_that_was_interrupted_keeps_the_history_when_done_again(tmp_path: Path) -> None:
    old = identity.load_or_create(tmp_path / identity.FILE).key.node_id
    in_the_way = tmp_path / f"old-{old[-8:]}" / identity.FILE
    in_the_way.mkdir(parents=True)
    with pytest.raises(DiskFailed):
        identity.rotate(tmp_path, drop_unsent=False, keep_history=True)
    in_the_way.rmdir()
    assert identity.load_or_create(tmp_path / identity.FILE).key.node_id == old
    was, new = identity.rotate(tmp_path, drop_unsent=False, keep_history=True, number=2)
    assert was == old
    assert identity.load_or_create(tmp_path / identity.FILE).key.node_id == new
    word = delegation.kept(tmp_path, new)
    assert word is not None
    assert delegation.owner_of(word, new)[0] == old
    assert identity.load_or_create(tmp_path / f"old-{old[-8:]}" / identity.FILE).key.node_id == old


def test_what_was_done_between_an_interrupted_rotation_and_the_next_is_kept_beside_the_older(tmp_path: Path) -> None:
    """The node joined again in between, with the key that it still had."""
    old = identity.load_or_create(tmp_path / identity.FILE).key.node_id
    outbox, aside = tmp_path / "rounds" / "r" / "outbox", tmp_path / f"old-{old[-8:]}"
    in_the_way = aside / identity.FILE
    in_the_way.mkdir(parents=True)
    for said in (b"first", b"second"):
        outbox.mkdir(parents=True)
        (outbox / "1.rollout").write_bytes(said)
        (outbox.parent / "address.json").write_bytes(said)
        if said == b"first":
            with pytest.raises(DiskFailed):
                identity.rotate(tmp_path, drop_unsent=True)
            in_the_way.rmdir()
    assert identity.rotate(tmp_path, drop_unsent=True)[0] == old
    kept = sorted(path.read_bytes() for path in aside.rglob("1.rollout"))
    assert kept == sorted(path.read_bytes() for path in aside.rglob("address.json*")) == [b"first", b"second"]
    assert not outbox.exists()


@pytest.mark.parametrize("word", [b"no statement", None])
def test_an_owners_node_does_not_take_its_history_along(tmp_path: Path, word: bytes | None) -> None:
    me = identity.load_or_create(tmp_path / identity.FILE).key.node_id
    of_owner = seal_statement(NodeKey(bytes(32)), Delegation(node_id=me, number=1))
    (tmp_path / delegation.FILE).write_bytes(of_owner if word is None else word)
    with pytest.raises(ConfigInvalid, match="works for an owner"):
        identity.rotate(tmp_path, drop_unsent=False, keep_history=True)
    assert identity.load_or_create(tmp_path / identity.FILE).key.node_id == me
