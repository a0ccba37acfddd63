"""What a member is doing, what lets it, and what the coordinator's reasons for giving no work mean to its owner."""

from enum import StrEnum
from typing import Protocol

from protocol.work.messages import Reason
from swarm_node.allowance.rules import Decision

NO_WORK: dict[Reason, str] = {
    "numerics": "this round does not admit what this node computes with, or has not calibrated it yet: `swarm-node "
    "why` shows claims that are held until then. Wait for the operator, or join with another --engine or --dtype",
    "paused": "the operator has paused this node; the round's page says since when and why",
    "standby": "cheaper nodes have the work; this node is on standby with the newest version until it is needed",
    "budget": "the round's budget is used up, or that of this hour",
    "audits": "the coordinator's auditors are behind; work continues when they have caught up",
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
