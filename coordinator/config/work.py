"""Settings of the work: how nodes sample, how stale it may be, how leases end, and which prompts are chosen."""

from typing import Literal

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
    half_life_s: float = Field(600.0, gt=0, description="half-life of speed measurements, in seconds")

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


class SamplingSection(Section):
    """How nodes sample."""

    temperature: float = Field(1.0, gt=0, le=10, description="of the distribution tokens are drawn from")
    max_new_tokens: int = Field(8, ge=1, le=limits.TOKENS_MAX, description="longest completion")
    samples_per_group: int = Field(16, ge=2, le=limits.SAMPLES_MAX, description="completions of one prompt")

    @model_validator(mode="after")
    def _fits_into_a_message(self) -> "SamplingSection":
        if 8 * self.samples_per_group * self.max_new_tokens > limits.MESSAGE_MAX_BYTES // 2:
            raise ValueError(
                f"{self.samples_per_group} samples of {self.max_new_tokens} tokens do not fit into one message; "
                f"samples_per_group x max_new_tokens may be {limits.MESSAGE_MAX_BYTES // 16} at most"
            )
        return self


class StalenessSection(Section):
    """The bound S, and how often a version is published."""

    max_updates: int = Field(4, ge=0, description="S: how many updates a rollout may lie behind the learner")
    adaptive: bool = Field(
        False, description="let S follow what the correction drops, between min_updates and max_updates"
    )
    min_updates: int = Field(1, ge=0, description="the least S, where it is adaptive, and the one to begin with")
    publish_every: int = Field(0, ge=0, description="kappa: updates between versions; 0 follows what is measured")

    admission: Literal["visible", "buffer"] = Field(
        "visible", description="visible: no more than can be trained on in time; buffer: until the buffer is full"
    )
    buffer_updates: int = Field(0, ge=0, description="the buffer, in updates' worth of groups; 0: 2 (S + 1)")

    @property
    def buffered_max(self) -> int:
        """How many updates' worth may wait or be under way, where admission goes by the buffer."""
        return self.buffer_updates or 2 * (self.max_updates + 1)

    @property
    def kappa(self) -> int:
        """As it is set; else, before anything is measured, the paper's S - 1."""
        return self.publish_every or max(1, self.least - 1)

    @property
    def least(self) -> int:
        """The least that S may be: versions come often enough for every bound that may be in force."""
        return max(self.min_updates, self.publish_every - 1) if self.adaptive else self.max_updates

    @model_validator(mode="after")
    def _publishes_within_the_bound(self) -> "StalenessSection":
        if self.kappa > self.max_updates + 1:
            raise ValueError(
                f"publish_every = {self.kappa} leaves the learner without fresh rollouts: the last version would be "
                f"{self.kappa - 1} updates old, and max_updates is {self.max_updates}"
            )
        return self

    @model_validator(mode="after")
    def _adapts_within_its_bounds(self) -> "StalenessSection":
        if self.adaptive and self.min_updates > self.max_updates:
            raise ValueError(f"min_updates = {self.min_updates} is more than max_updates = {self.max_updates}")
        if self.adaptive and self.admission == "buffer":
            raise ValueError("adaptive needs admission = visible: a buffer takes whatever fits, however old it becomes")
        return self


class SelectionSection(Section):
    """Prompts by what their groups came to; as it stands, all are taken in their order."""

    filter_after: int = Field(
        0, ge=0, description="groups in a row of equal rewards after which a prompt is left out; 0: never"
    )
    probe_every: int = Field(4, ge=2, le=1000, description="of so many times that a prompt comes up, it is taken once")
    window: int = Field(64, ge=1, le=1024, description="prompts that are looked at together")
    share: float = Field(1.0, gt=0, le=1, description="of a window that is taken, the most promising ones; 1: all")
    refill: float = Field(
        0.0,
        ge=0,
        le=16,
        description="groups of equal rewards that others replace, in parts of a batch; 0: none",
    )
    exploration: float = Field(
        0.5, ge=0, description="what it is worth that a prompt was seldom seen, in units of reward"
    )
