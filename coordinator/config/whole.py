"""All tables of the operator's file, in the order of its manual."""

from pathlib import Path
from typing import Any

from pydantic import model_validator

from coordinator.config.audit import AuditSection, LedgerSection
from coordinator.config.learner import CorrectionSection, LearnerSection, ObjectiveSection
from coordinator.config.modes import with_mode
from coordinator.config.money import MarketSection, PayoutsSection
from coordinator.config.publish import PublishSection
from coordinator.config.round import ModelSection, RoundSection, StoreSection
from coordinator.config.section import Section
from coordinator.config.task import DataSection, EpisodeSection, EvalSection, RewardSection, TaskSection
from coordinator.config.work import FleetSection, LeasesSection, SamplingSection, SelectionSection, StalenessSection
from protocol import limits
from protocol.tasks import BUILT_IN


class Config(Section):
    """The whole configuration file."""

    round: RoundSection = RoundSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    data: DataSection = DataSection()
    reward: RewardSection = RewardSection()
    episode: EpisodeSection = EpisodeSection()
    selection: SelectionSection = SelectionSection()
    sampling: SamplingSection = SamplingSection()
    staleness: StalenessSection = StalenessSection()
    learner: LearnerSection = LearnerSection()
    objective: ObjectiveSection = ObjectiveSection()
    correction: CorrectionSection = CorrectionSection()
    eval: EvalSection = EvalSection()
    market: MarketSection = MarketSection()
    payouts: PayoutsSection = PayoutsSection()
    fleet: FleetSection = FleetSection()
    leases: LeasesSection = LeasesSection()
    audit: AuditSection = AuditSection()
    ledger: LedgerSection = LedgerSection()
    publish: PublishSection = PublishSection()
    store: StoreSection = StoreSection()

    @model_validator(mode="before")
    @classmethod
    def _takes_its_mode(cls, table: Any) -> Any:
        return with_mode(table)

    @model_validator(mode="after")
    def _is_judged_once(self) -> "Config":
        if self.reward.functions and self.task.name in BUILT_IN:
            raise ValueError(
                f"task {self.task.name} judges by itself; reward.functions are for data, math, reasoning-gym and files"
            )
        return self

    @model_validator(mode="after")
    def _evaluates_with_answers_that_fit(self) -> "Config":
        if self.eval.every and 8 * self.eval.samples * self.sampling.max_new_tokens > limits.MESSAGE_MAX_BYTES // 2:
            raise ValueError(
                f"eval.samples x sampling.max_new_tokens may be {limits.MESSAGE_MAX_BYTES // 16} at most: "
                "an answer must fit into one message"
            )
        return self

    @model_validator(mode="after")
    def _has_a_group_for_each_minibatch(self) -> "Config":
        if (self.objective.minibatches or 1) > self.learner.groups_per_update:
            raise ValueError(
                f"objective.minibatches is {self.objective.minibatches}, but an update has only "
                f"{self.learner.groups_per_update} groups (learner.groups_per_update)"
            )
        return self

    @model_validator(mode="after")
    def _adapts_to_what_is_measured(self) -> "Config":
        if self.staleness.adaptive and self.correction.mode == "none":
            raise ValueError("staleness.adaptive follows what the correction drops, and correction.mode is none")
        return self

    @property
    def state(self) -> Path | str:
        """Return the path or URL that `coordinator.store.state.Database` opens."""
        return self.store.url or self.round.directory / "state.db"

    def with_absolute_folder(self) -> "Config":
        """Return the same configuration with an absolute folder, so that child processes find it from anywhere."""
        place = self.round.model_copy(update={"directory": self.round.directory.absolute()})
        return self.model_copy(update={"round": place})
