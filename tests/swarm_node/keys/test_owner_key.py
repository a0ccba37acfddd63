"""The owner's key file: encrypted, for its owner only, and nothing of it anywhere else."""

import json
import os
import stat
from pathlib import Path

import pytest

from protocol.errors import ConfigInvalid
from swarm_node.keys import owner_key

WORDS = "correct horse battery"


def test_key_file_is_for_its_owner_only_and_holds_no_seed(tmp_path: Path) -> None:
    path = tmp_path / "apart" / "owner.key"
    made = owner_key.create(path, WORDS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    seed = owner_key.unlock(path, WORDS)
    assert seed.hex() not in path.read_text()
    assert owner_key.read(path).owner == made.node_id
    with pytest.raises(ConfigInvalid, match="does not open"):
        owner_key.unlock(path, WORDS + "!")
    with pytest.raises(ConfigInvalid, match="exists already"):
        owner_key.create(path, WORDS)


def test_key_file_under_another_owners_name_does_not_open(tmp_path: Path) -> None:
    """Else a thief's id over a stolen file would have its owner sign as somebody they are not."""
    path, other = tmp_path / "owner.key", tmp_path / "other.key"
    owner_key.create(path, WORDS)
    owner_key.create(other, WORDS)
    forged = json.loads(path.read_text()) | {"owner": owner_key.read(other).owner}
    path.write_text(json.dumps(forged))
    with pytest.raises(ConfigInvalid, match="does not open"):
        owner_key.unlock(path, WORDS)


@pytest.mark.parametrize(
    "change",
    [{"scrypt_cost": 2**30}, {"scrypt_cost": 2}, {"salt": ""}, {"seed": "zz"}, {"kind": "x"}, {"more": 1}],
    ids=str,
)
def test_forged_key_file_is_refused_before_it_costs_memory(tmp_path: Path, change: dict[str, object]) -> None:
    sound = owner_key.KeyFile(owner="o", scrypt_cost=2**14, salt="00", nonce="00", seed="00").model_dump()
    path = tmp_path / "owner.key"
    path.write_text(json.dumps(sound | change))
    with pytest.raises(ConfigInvalid, match="does not hold"):
        owner_key.read(path)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff" * 10, bytes(10**6)], ids=len)
def test_anything_else_is_no_key_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "owner.key"
    path.write_bytes(data)
    with pytest.raises(ConfigInvalid):
        owner_key.read(path)


def test_passphrase_comes_from_a_file_or_a_descriptor_and_a_short_one_makes_no_key(tmp_path: Path) -> None:
    file = tmp_path / "words"
    file.write_bytes(WORDS.encode() + b"\r\nnot this\n")
    assert owner_key.passphrase(file, None) == WORDS
    reading, writing = os.pipe()
    os.write(writing, WORDS.encode())
    os.close(writing)
    assert owner_key.passphrase(None, reading) == WORDS
    os.close(reading)
    with pytest.raises(ConfigInvalid, match="not both"):
        owner_key.passphrase(file, 0)
    with pytest.raises(ConfigInvalid, match="Cannot read"):
        owner_key.passphrase(tmp_path / "nowhere", None)
    with pytest.raises(ConfigInvalid, match="--passphrase-file"):
        owner_key.passphrase(None, None)  # nobody types it into a test
    with pytest.raises(ConfigInvalid, match="characters"):
        owner_key.create(tmp_path / "owner.key", "short")
    assert not (tmp_path / "owner.key").exists()
