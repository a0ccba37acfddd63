"""Activity of a member, the gate that permits it, and the coordinator's reasons for giving no work, in words."""

from enum import StrEnum
from typing import Protocol

from protocol.work.messages import Reason
from swarm_node.allowance.rules import Decision

NO_WORK: dict[Reason, str] = {
    "numerics": "this round does not accept this node's engine and precision, or they are not calibrated yet: "
    "`swarm-node why` shows claims that are held until then. "
    "Wait for the operator, or join with another --engine or --dtype",
    "paused": "the operator paused this node; the round's page shows when and why",
    "standby": "cheaper nodes do the work; this node is on standby and is activated when needed",
    "budget": "the budget of the round or of this hour is used up",
    "audits": "the coordinator's audits are delayed; work continues when they catch up",
}
"""Explanations for the owner; the other reasons end by themselves."""


class Gate(Protocol):
    """The owner's permission for this node to work."""

    @property
    def decision(self) -> Decision: ...

    @property
    def finishing(self) -> bool: ...

    async def opened(self) -> None:
        """Return when the node may work, or must finish."""

    async def closed(self) -> None:
        """Return when the node must not work."""


class Phase(StrEnum):
    """Activity of a member; a worker never mirrors, and a mirror does nothing else."""

    OFFLINE = "offline"
    IDLE = "idle"
    GENERATING = "generating"
    MIRRORING = "mirroring"
    RESTING = "resting"
    """The owner's settings permit no work for now."""
