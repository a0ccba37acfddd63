"""The operator's own nodes, which `launch` starts on the learner's device: their homes, keys and commands.

- Their keys are created here, so that a round without strangers knows them before they register.
- Each has a usual node home, kept in the round's folder; the node stops with the coordinator.
"""

import secrets
from pathlib import Path

from coordinator.base.children import script
from coordinator.base.files import write_durably
from coordinator.config import Config
from protocol.errors import ConfigInvalid
from protocol.ids import NodeId
from protocol.wire.signing import NodeKey

KEY_BYTES = 32


def homes(config: Config) -> list[Path]:
    return [config.round.directory / "local" / f"node-{number + 1}" for number in range(config.fleet.local_nodes)]


def open_keys(config: Config) -> frozenset[NodeId]:
    """Return the ids of these nodes; create missing keys."""
    return frozenset(_open_key(home / "node.key") for home in homes(config))


def command(config: Config, home: Path, join_string: str) -> list[str]:
    """Return the command that starts the node with this home."""
    device = config.learner.device.partition(":")[0]
    place = ["--home", str(home), "--name", f"local-{home.name}", "--device", device]
    return [script("swarm-node"), "join", join_string, *place, "--price", "0", "--threads", "1", "--child"]


def _open_key(path: Path) -> NodeId:
    if not path.exists():
        write_durably(path, secrets.token_bytes(KEY_BYTES).hex().encode())
    try:
        return NodeKey(bytes.fromhex(path.read_text().strip())).node_id
    except ValueError:
        raise ConfigInvalid(
            f"{path} does not contain a node key.", hint="Remove the file; a new key is then created."
        ) from None
