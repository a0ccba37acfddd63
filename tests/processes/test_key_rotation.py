"""The operator replaces keys by command, while the old ones are abused: nodes follow the new, and only these."""

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, MetaFile, Snapshot, Timestamp
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.publishing.signed_metadata import ROLES
from coordinator.service.opening import only_coordinator
from protocol import limits
from protocol.errors import ConfigInvalid, RolledBack, UntrustedMetadata
from tests.processes.trust_world import ONLINE, Node, Operator, Served, forge_everything, forge_timestamp
from tests.swarm_node.web import Web


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    made = Operator(tmp_path / "round")
    made.publish()
    made.publish()
    return made


@pytest.fixture
def served(operator: Operator) -> Served:
    return Served(operator.metadata_folder)


@pytest.fixture
def web(served: Served) -> Iterator[Web]:
    made = Web(served.manner)
    yield made
    made.close()


@pytest.fixture
async def node(web: Web, operator: Operator, tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(web, operator.metadata.round_id, tmp_path / "node" / "trust.msgpack")
    assert await made.sees() == 2
    yield made
    await made.close()


@asynccontextmanager
async def newcomer(web: Web, operator: Operator, folder: Path) -> AsyncIterator[Node]:
    made = Node(web, operator.metadata.round_id, folder / "newcomer" / "trust.msgpack")
    yield made
    await made.close()


@pytest.mark.trio
@pytest.mark.parametrize("role", ROLES)
async def test_rotated_role_is_followed_and_its_old_key_refused(
    operator: Operator, served: Served, node: Node, web: Web, tmp_path: Path, role: str
) -> None:
    stolen = {name: operator.steal(name) for name in ROLES}
    operator.run("rotate", role, operator.config)
    assert await node.sees() == 2
    operator.publish()
    assert await node.sees() == 3
    async with newcomer(web, operator, tmp_path) as other:
        assert await other.sees() == 3
    if role == "root":
        root = operator.metadata.root()
        root.version += 1
        forged = Metadata(root)
        forged.sign(stolen["root"])
        served.forged[f"{root.version}.root.json"] = forged.to_bytes()
    else:
        forge_everything(served, stolen, 50, operator.metadata.round_id)
    await node.refuses(UntrustedMetadata)
    served.forged.clear()
    assert await node.sees() == 3


@pytest.mark.trio
@pytest.mark.parametrize("role", ROLES)
async def test_role_by_threshold_needs_that_many_keys(
    operator: Operator, served: Served, node: Node, role: str
) -> None:
    operator.run("rotate", role, operator.config, "--keys", "3", "--threshold", "2")
    operator.publish()
    assert await node.sees() == 3
    assert f"{role}: 2 of 3 must sign" in operator.run("show", operator.config)
    files = sorted(operator.keys.glob(f"{role}-*.pem"))
    assert len(files) == 3
    files[0].unlink()
    again = ["rotate", "root", operator.config] if role == "root" else []
    operator.run(*again) if again else operator.publish()
    assert await node.sees() == operator.version
    if role == "root":
        return
    files[1].unlink()
    with pytest.raises(ConfigInvalid, match=f"{role} key is missing: 1 of the 2"):
        operator.publish()


@pytest.mark.trio
async def test_compromised_timestamp_key_is_worthless_after_its_rotation(
    operator: Operator, served: Served, node: Node
) -> None:
    """Fast-forward, then freeze for a century: the thief signs the highest number there is, and nodes believe it."""
    thief = operator.steal("timestamp")
    forge_timestamp(served, thief, 2**62)
    assert await node.sees() == 2
    served.forged.clear()
    operator.publish()
    await node.refuses(RolledBack)

    operator.run("rotate", "timestamp", operator.config)
    node.restart()
    assert await node.sees() == 3
    forge_timestamp(served, thief, 2**62 + 1)
    await node.refuses(UntrustedMetadata)
    served.forged.clear()
    operator.publish()
    assert await node.sees() == 4


@pytest.mark.trio
async def test_fast_forward_by_all_online_keys_is_undone_by_rotating_them(
    operator: Operator, served: Served, node: Node
) -> None:
    """Even the policy's own number, the highest there is, binds nobody once its signer is revoked."""
    thieves = {role: operator.steal(role) for role in ONLINE}
    forge_everything(served, thieves, limits.VERSION_MAX, operator.metadata.round_id)
    assert await node.sees() == limits.VERSION_MAX
    served.forged.clear()
    await node.refuses(RolledBack)
    for role in ONLINE:
        operator.run("rotate", role, operator.config)
    node.restart()
    operator.publish()
    assert await node.sees() == 3
    forge_everything(served, thieves, limits.VERSION_MAX, operator.metadata.round_id)
    await node.refuses(UntrustedMetadata)


@pytest.mark.trio
async def test_timestamp_key_alone_can_neither_roll_back_nor_publish(
    operator: Operator, served: Served, node: Node
) -> None:
    thief = operator.steal("timestamp")
    timestamp = Metadata[Timestamp].from_bytes(served.read("timestamp.json"))
    for version, error in ((2, RolledBack), (3, UntrustedMetadata)):
        timestamp.signed.version += 1
        timestamp.signed.snapshot_meta = MetaFile(version)
        if version == 3:
            forged = Metadata[Snapshot].from_bytes(served.read("3.snapshot.json"))
            forged.signed.expires += timedelta(days=1)
            forged.sign(thief)
            served.forged["3.snapshot.json"] = forged.to_bytes()
            timestamp.signed.snapshot_meta = MetaFile.from_data(4, forged.to_bytes(), ["sha256"])
            served.forged["4.snapshot.json"] = forged.to_bytes()
        timestamp.sign(thief)
        served.forged["timestamp.json"] = timestamp.to_bytes()
        await node.refuses(error)
    served.forged.clear()
    assert await node.sees() == 2


@pytest.mark.trio
async def test_node_that_slept_over_many_rotations_catches_up(operator: Operator, node: Node) -> None:
    for role in (*ROLES, *ROLES, "root", "timestamp"):
        operator.run("rotate", role, operator.config)
        operator.publish()
    node.restart()
    assert await node.sees() == operator.version == 12


@pytest.mark.trio
async def test_root_keys_of_several_holders_sign_one_after_the_other(
    operator: Operator, node: Node, tmp_path: Path
) -> None:
    """Three holders, two must sign; no two of their keys are ever on one machine."""
    operator.run("rotate", "root", operator.config, "--keys", "3", "--threshold", "2")
    holders = [tmp_path / f"holder-{number}" for number in range(3)]
    for holder, path in zip(holders, sorted(operator.keys.glob("root-*.pem")), strict=True):
        holder.mkdir()
        shutil.move(path, holder)
    operator.publish()
    pending = operator.folder / "pending.root.json"
    assert "2 signatures" in operator.run("rotate", "timestamp", operator.config)
    assert "exists already" in operator.run("rotate", "timestamp", operator.config, fails=True)
    assert "lacks" not in operator.run("install", operator.config)  # it says what is missing, and keeps waiting
    assert await node.sees() == 3
    operator.run("sign", str(pending), "--root-keys", str(holders[0]))
    assert "1 signatures" in operator.run("install", operator.config)
    operator.run("sign", str(pending), "--root-keys", str(holders[0]))
    assert "1 signatures" in operator.run("install", operator.config)
    operator.run("sign", str(pending), "--root-keys", str(holders[2]))
    assert "is published" in operator.run("install", operator.config)
    assert not pending.exists()
    operator.publish()
    assert await node.sees() == 4


def test_installing_needs_the_keys_that_must_sign_next(operator: Operator, tmp_path: Path) -> None:
    """Else nodes would see a root under which nobody here can sign the rest."""
    shutil.move(operator.keys / "snapshot.pem", tmp_path)
    assert "snapshot key is missing" in operator.run("rotate", "timestamp", operator.config, fails=True)
    assert operator.metadata.root().version == 1
    assert "snapshot: 1 of 1 must sign" in operator.run("show", operator.config)
    assert "(not on this machine)" in operator.run("show", operator.config)


def change_version(data: bytes) -> bytes:
    return data.replace(b'"version":2', b'"version":3')


def strangers_signatures(data: bytes) -> bytes:
    document = Metadata.from_bytes(data)
    document.signatures.clear()
    document.sign(CryptoSigner.generate_ed25519())
    return document.to_bytes()


@pytest.mark.parametrize("attack", [change_version, strangers_signatures, lambda data: b"{}", lambda data: data[:-9]])
def test_prepared_root_that_was_tampered_with_is_not_installed(
    operator: Operator, tmp_path: Path, attack: Callable[[bytes], bytes]
) -> None:
    stick = tmp_path / "stick"
    stick.mkdir()
    shutil.move(operator.keys / "root.pem", stick)
    operator.run("rotate", "timestamp", operator.config)
    pending = operator.folder / "pending.root.json"
    operator.run("sign", str(pending), "--root-keys", str(stick))
    pending.write_bytes(attack(pending.read_bytes()))
    before = sorted(path.name for path in operator.metadata_folder.iterdir())
    result = CliRunner().invoke(
        app, ["keys", "install", operator.config, "--set", f"round.directory={operator.folder}"]
    )
    assert result.exception is not None or "missing" in result.output
    assert sorted(path.name for path in operator.metadata_folder.iterdir()) == before


@pytest.mark.trio
async def test_crash_between_new_root_and_new_timestamp_is_mended_at_the_next_start(
    operator: Operator, node: Node, tmp_path: Path
) -> None:
    """The root is out, and what the revoked key signed is still there: the next opening signs it anew."""
    before = tmp_path / "before"
    shutil.copytree(operator.metadata_folder, before)
    operator.run("rotate", "snapshot", operator.config)
    for name in ("timestamp.json", "3.snapshot.json", "3.targets.json"):
        shutil.copyfile(before / name, operator.metadata_folder / name)
    await node.refuses(UntrustedMetadata)
    operator.metadata.mend(datetime.now(UTC))
    assert await node.sees() == 2
    operator.publish()
    assert await node.sees() == 3


def test_rotation_while_the_coordinator_runs_is_refused(operator: Operator) -> None:
    with only_coordinator(operator.folder):
        assert "is running" in operator.run("rotate", "timestamp", operator.config, fails=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("rotate", "king"), "Roles: root"),
        (("rotate", "root", "--keys", "1", "--threshold", "2"), "threshold"),
        (("install",), "keys rotate"),
    ],
)
def test_wrong_use_is_told_by_name(operator: Operator, words: tuple[str, ...], said: str) -> None:
    first, *options = words[1:] or ("",)
    arguments = [words[0], *([first] if first else []), operator.config, *options]
    assert said in operator.run(*arguments, fails=True)


def test_replaced_keys_are_deleted_and_new_ones_are_their_owners_alone(operator: Operator) -> None:
    old = {path.name: path.read_bytes() for path in operator.keys.iterdir()}
    operator.run("rotate", "timestamp", operator.config)
    new = {path.name: path.read_bytes() for path in operator.keys.iterdir()}
    assert old["timestamp.pem"] not in new.values()
    assert {name: data for name, data in old.items() if name != "timestamp.pem"}.items() <= new.items()
    assert all(path.stat().st_mode & 0o077 == 0 for path in operator.keys.iterdir())
