"""How nodes sample, and how stale their work may be."""

from typing import Literal

from pydantic import Field, model_validator

from coordinator.config.section import Section
from protocol import limits


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
