"""Who works, and how work is handed out."""

from pydantic import Field, model_validator

from coordinator.config.section import Section
from protocol import limits


class FleetSection(Section):
    """Who works and who stands by."""

    local_nodes: int = Field(0, ge=0, le=16, description="nodes that launch starts here, on the learner's device")
    strangers: bool = Field(True, description="whether other nodes than these may join")
    gamma: float = Field(0.0, ge=0, description="throughput to keep, times what the learner needs; 0: everybody works")
    budget_micros_per_hour: int = Field(0, ge=0, description="most that is spent in an hour; 0 is no limit")
    window_s: float = Field(60.0, ge=0, description="how long too little or too dear must last to be changed")
    margin: float = Field(0.1, ge=0, description="how much cheaper another fleet must be")
    dwell_s: float = Field(300.0, ge=0, description="how long a node works or stands by before it is moved to save")
    half_life_s: float = Field(600.0, gt=0, description="after this an answer says half as much of a node's rate")

    @model_validator(mode="after")
    def _somebody_samples(self) -> "FleetSection":
        if not (self.strangers or self.local_nodes):
            raise ValueError("nobody would sample: strangers = false needs local_nodes")
        return self


class LeasesSection(Section):
    """How work is handed out."""

    timeout_s: float = Field(60.0, gt=0, description="after this an unanswered lease goes to somebody else")
    groups_per_request: int = Field(8, ge=1, le=limits.LEASES_PER_REQUEST_MAX, description="most groups given at once")
    newcomer_leases: int = Field(4, ge=1, description="leases that a node may hold before it has answered one")
    over_issue: int = Field(2, ge=0, description="late groups that a second node gets when a batch waits only for them")
    lookahead: int = Field(
        16, ge=0, le=1024, description="groups of which long ones go to fast nodes; 0: the oldest to anybody"
    )
    heartbeat_s: float = Field(2.0, gt=0, description="how often nodes report; plans name no node that missed three")

    @property
    def silent_after_ms(self) -> int:
        """A node that was not heard of for so long is not counted on."""
        return int(3000 * self.heartbeat_s)
