"""A round's trust as its operator, a node and a thief see it.

- The repository is the coordinator's own, on the disk; the node is the real updater, which fetches over HTTP.
- A thief's documents are served by a web server in the coordinator's place.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest
import trio
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, MetaFile, Snapshot, TargetFile, Targets, Timestamp
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.publishing.signed_metadata import RoleKeys, SignedMetadata
from protocol.errors import ConfigInvalid, SwarmError
from protocol.policy.manifest import target_path
from protocol.wire.signing import NodeKey
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.origins import Origins
from swarm_node.versions.updater import Updater
from tests.protocol.tuf_repository import manifest_bytes
from tests.swarm_node.web import Handler, Web

LIFETIME_S = 600.0
KEEP = 4

ONLINE = ("targets", "snapshot", "timestamp")


class Operator:
    """A stopped coordinator's round, and the commands of its operator."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys, self.metadata_folder = folder, folder / "keys", folder / "metadata"
        self.metadata = SignedMetadata.create(self.keys, self.metadata_folder, LIFETIME_S, datetime.now(UTC))
        self.version = 0

    def publish(self) -> None:
        self.version += 1
        data = manifest_bytes(self.metadata.round_id, self.version)
        self.metadata.add_manifest(self.version, data, KEEP, datetime.now(UTC))

    def run(self, *words: str, fails: bool = False) -> str:
        """A command of `swarm-coordinator keys`; what it printed, or the error it ended with."""
        place = [] if words[0] == "sign" else ["--set", f"round.directory={self.folder}"]
        (self.folder / "round.toml").touch()
        result = CliRunner().invoke(app, ["keys", *words, *place])
        if fails:
            assert isinstance(result.exception, ConfigInvalid), result
            return str(result.exception)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    @property
    def config(self) -> str:
        return str(self.folder / "round.toml")

    def steal(self, role: str) -> CryptoSigner:
        (signer,) = RoleKeys(self.keys).signers(self.metadata.root(), role)
        return signer


class Node:
    """A real updater, and what its coordinator's address really serves."""

    def __init__(self, web: Web, round_id: str, state: Path) -> None:
        self._coordinator = Coordinator(web.url, round_id, NodeKey(b"1" * 32))
        self._round_id, self._state = round_id, state
        self.restart()

    async def sees(self) -> int:
        with trio.fail_after(120):
            manifest = await self.updater.refresh()
        return manifest.version if manifest else 0

    async def refuses(self, error: type[SwarmError]) -> None:
        with pytest.raises(SwarmError) as caught:
            await self.sees()
        assert type(caught.value) is error, caught.value

    def restart(self) -> None:
        self.updater = Updater(Origins(self._coordinator, Random(1)), self._round_id, self._state)

    async def close(self) -> None:
        await self._coordinator.close()


class Served:
    """The round's documents, with a thief's laid over them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.forged: dict[str, bytes] = {}

    def manner(self, request: Handler) -> None:
        name = request.path.removeprefix("/v1/metadata/")
        path = self.folder / name
        data = self.forged.get(name) or (path.read_bytes() if path.is_file() else None)
        request.answer(404, b"") if data is None else request.answer(200, data)

    def read(self, name: str) -> bytes:
        return self.forged.get(name) or (self.folder / name).read_bytes()


def forge_timestamp(served: Served, thief: CryptoSigner, version: int) -> None:
    """The current set under a timestamp of any number, good for a century."""
    timestamp = Metadata[Timestamp].from_bytes(served.read("timestamp.json"))
    timestamp.signed.version = version
    timestamp.signed.expires += timedelta(days=36500)
    timestamp.sign(thief)
    served.forged["timestamp.json"] = timestamp.to_bytes()


def forge_everything(served: Served, thieves: dict[str, CryptoSigner], version: int, round_id: str) -> None:
    """A policy of any version number, by a thief of all three keys that are online."""
    now = datetime.now(UTC).replace(microsecond=0) + timedelta(days=300)
    data, path = manifest_bytes(round_id, version), target_path(version)
    targets = Targets(version=version, expires=now, targets={path: TargetFile.from_data(path, data, ["sha256"])})
    snapshot = Snapshot(version=version, expires=now, meta={"targets.json": MetaFile(version)})
    timestamp = Timestamp(version=version, expires=now, snapshot_meta=MetaFile(version))
    served.forged[path] = data
    for role, name, part in (
        ("targets", f"{version}.targets.json", Metadata(targets)),
        ("snapshot", f"{version}.snapshot.json", Metadata(snapshot)),
        ("timestamp", "timestamp.json", Metadata(timestamp)),
    ):
        part.sign(thieves[role])
        served.forged[name] = part.to_bytes()
