"""The owner's signed delegation to this node: kept in the home, and sent at every registration."""

from pathlib import Path

from protocol.errors import ConfigInvalid, SwarmError
from protocol.ids import NodeId
from protocol.people.owner import Delegation, open_statement
from swarm_node.base.disk import disk_named, write_durably

FILE = "delegation"


def kept(home: Path, node: NodeId, given: Path | None = None) -> bytes | None:
    """Return the delegation in a home, or store and return the one in file `given`; None for a node without owner."""
    path = given or home / FILE
    if not path.exists() and given is None:
        return None
    try:
        data = path.read_bytes()
        owner_of(data, node)
    except OSError as error:
        raise ConfigInvalid(
            f"{'--owner: ' if given else ''}{path} cannot be read: {error.strerror}.",
            hint="Give the file that the owner made with `swarm-node keys delegate`.",
        ) from None
    except SwarmError as error:
        raise ConfigInvalid(
            f"{path} is not a delegation to {node} ({error}).", hint="Ask the owner to run `swarm-node keys delegate`."
        ) from None
    if given is not None:
        with disk_named(home):
            home.mkdir(parents=True, exist_ok=True)
        write_durably(home / FILE, data, temp_folder=home)
    return data


def owner_of(data: bytes, node: NodeId) -> tuple[NodeId, Delegation]:
    """Return the owner and the delegation; raise an error if it is not for this node."""
    owner, said = open_statement(data)
    if not isinstance(said, Delegation) or said.node_id != node:
        raise ConfigInvalid("The delegation is for another node.")
    return owner, said
