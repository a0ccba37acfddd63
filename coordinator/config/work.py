"""Settings of the work: fleet, leases, sampling, staleness and the selection of prompts."""

from typing import Literal

from pydantic import Field, model_validator

from coordinator.config.section import Section
from protocol import limits


class FleetSection(Section):
    """The fleet: local nodes, and the nodes at work or on standby."""

    local_nodes: int = Field(
        0, ge=0, le=16, description="nodes that `launch` starts on this machine, on the learner's device"
    )
    strangers: bool = Field(True, description="accept nodes other than the local ones")
    gamma: float = Field(
        0.0, ge=0, description="target throughput as a multiple of the learner's need; 0: all nodes work"
    )
    budget_micros_per_hour: int = Field(0, ge=0, description="maximum spending per hour; 0: no limit")
    window_s: float = Field(
        60.0, ge=0, description="time that a shortage or an excess cost must last before the fleet changes"
    )
    margin: float = Field(0.1, ge=0, description="minimum saving, as a share of the cost, for which the fleet changes")
    dwell_s: float = Field(
        300.0, ge=0, description="minimum time between two moves of a node to or from standby to save cost"
    )
    half_life_s: float = Field(600.0, gt=0, description="half-life of speed measurements, in seconds")

    @model_validator(mode="after")
    def _somebody_samples(self) -> "FleetSection":
        if not (self.strangers or self.local_nodes):
            raise ValueError("strangers = false needs local_nodes of at least 1; otherwise no node samples")
        return self


LEASE_MIN_S = 60.0
"""The lease time of short answers, if it is not set: the node may have several groups, and load a version first."""

LEASE_TOKEN_S = 0.1
"""The lease time for each token of long answers, if it is not set: 10 tokens/s in each sample are fast enough."""


class LeasesSection(Section):
    """Leases of work to nodes."""

    timeout_s: float = Field(
        0.0,
        ge=0,
        description="lease time; an unanswered lease then goes to another node; 0: 0.1 s for each token that an answer "
        "may have, and 60 s at least",
    )
    groups_per_request: int = Field(
        8, ge=1, le=limits.LEASES_PER_REQUEST_MAX, description="maximum number of groups per lease request"
    )
    newcomer_leases: int = Field(
        4, ge=1, description="maximum number of leases of a node that has not answered one yet"
    )
    over_issue: int = Field(
        2, ge=0, description="late groups that are leased to a second node when a batch waits only for them"
    )
    lookahead: int = Field(
        16, ge=0, le=1024, description="groups from which fast nodes get the longest; 0: oldest first for all nodes"
    )
    heartbeat_s: float = Field(
        2.0, gt=0, description="interval of node heartbeats; a node that misses three is left out of plans"
    )

    def lease_s(self, tokens_max: int) -> float:
        """Return the lease time of answers of at most `tokens_max` tokens."""
        return self.timeout_s or max(LEASE_MIN_S, LEASE_TOKEN_S * tokens_max)

    @property
    def silent_after_ms(self) -> int:
        """Return the time without a heartbeat after which a node counts as offline."""
        return int(3000 * self.heartbeat_s)


class SamplingSection(Section):
    """Sampling on the nodes."""

    temperature: float = Field(1.0, gt=0, le=10, description="sampling temperature")
    max_new_tokens: int = Field(8, ge=1, le=limits.TOKENS_MAX, description="maximum number of tokens of a completion")
    samples_per_group: int = Field(16, ge=2, le=limits.SAMPLES_MAX, description="G: completions per prompt")

    @model_validator(mode="after")
    def _fits_into_a_message(self) -> "SamplingSection":
        if 8 * self.samples_per_group * self.max_new_tokens > limits.MESSAGE_MAX_BYTES // 2:
            raise ValueError(
                f"{self.samples_per_group} samples of {self.max_new_tokens} tokens do not fit into one message; "
                f"samples_per_group x max_new_tokens may be {limits.MESSAGE_MAX_BYTES // 16} at most"
            )
        return self


class StalenessSection(Section):
    """The staleness bound S, and the publication interval."""

    max_updates: int = Field(4, ge=0, description="S: maximum staleness of a rollout when it is trained on, in updates")
    adaptive: bool = Field(
        False, description="adapt S, from min_updates to max_updates, to the share that the correction drops"
    )
    min_updates: int = Field(1, ge=0, description="minimum and initial S, if adaptive")
    publish_every: int = Field(0, ge=0, description="kappa: updates between versions; 0: chosen from measurements")

    admission: Literal["visible", "buffer"] = Field(
        "visible",
        description="visible: lease only work that can be trained on in time; buffer: until the buffer is full",
    )
    buffer_updates: int = Field(
        0, ge=0, description="size of the buffer, in batches (groups of one update); 0: 2 (S + 1)"
    )

    @property
    def buffered_max(self) -> int:
        """Return how many groups, in updates, may wait or be under way if admission counts the buffer."""
        return self.buffer_updates or 2 * (self.max_updates + 1)

    @property
    def kappa(self) -> int:
        """Return the publication interval as set; else, before any measurement, the paper's S - 1."""
        return self.publish_every or max(1, self.least - 1)

    @property
    def least(self) -> int:
        """Return the least S: versions come often enough for every bound that may be in force."""
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
            raise ValueError("adaptive needs admission = visible: a buffer accepts groups of any staleness")
        return self


class SelectionSection(Section):
    """Selection of prompts by earlier rewards; by default all prompts are used in order."""

    filter_after: int = Field(
        0, ge=0, description="skip a prompt after this many groups in a row with equal rewards; 0: never"
    )
    probe_every: int = Field(4, ge=2, le=1000, description="use a skipped prompt once in this many turns")
    window: int = Field(64, ge=1, le=1024, description="number of prompts that are ranked together")
    share: float = Field(
        1.0, gt=0, le=1, description="share of each window that is used, most promising prompts first; 1: all"
    )
    refill: float = Field(
        0.0,
        ge=0,
        le=16,
        description="maximum replaced groups with equal rewards, as a multiple of a batch; 0: none",
    )
    exploration: float = Field(0.5, ge=0, description="bonus for rarely used prompts, in units of reward")
