"""What a member is doing, what lets it, and what the coordinator's reasons for giving no work mean to its owner."""

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
"""What the owner should know; the other reasons pass by themselves."""


class Gate(Protocol):
    """Whether the owner lets this node work."""

    @property
    def decision(self) -> Decision: ...

    @property
    def finishing(self) -> bool: ...

    async def opened(self) -> None:
        """Return when it may work, or is to finish."""

    async def closed(self) -> None:
        """Return when it may not."""


class Phase(StrEnum):
    """What a member is doing; a worker never mirrors, and a mirror does nothing else."""

    OFFLINE = "offline"
    IDLE = "idle"
    GENERATING = "generating"
    MIRRORING = "mirroring"
    RESTING = "resting"
    """Its owner lets it do nothing for now."""
