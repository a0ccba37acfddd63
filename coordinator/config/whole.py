"""All tables of the operator's file, in the order of its manual."""

from pathlib import Path
from typing import Any

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from coordinator.config.audit import AuditSection, LedgerSection
from coordinator.config.learner import CorrectionSection, LearnerSection, ObjectiveSection
from coordinator.config.money import MarketSection, PayoutsSection, find_rail_unit, payable_units
from coordinator.config.round import ModelSection, NotifySection, PublishSection, RoundSection, StoreSection, with_mode
from coordinator.config.section import Section
from coordinator.config.task import DataSection, EpisodeSection, EvalSection, RewardSection, TaskSection
from coordinator.config.work import FleetSection, LeasesSection, SamplingSection, SelectionSection, StalenessSection
from protocol import limits
from protocol.people.payout_addresses import check_holder, check_iban
from protocol.tasks import BUILT_IN

CONTRADICTIONS = "contradictions"
"""The type of the error of settings that contradict each other; its context has all of them."""


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
    notify: NotifySection = NotifySection()

    @model_validator(mode="before")
    @classmethod
    def _takes_its_mode(cls, table: Any) -> Any:
        return with_mode(table)

    @model_validator(mode="after")
    def _has_no_contradictions(self) -> "Config":
        if found := contradictions(self):
            raise PydanticCustomError(CONTRADICTIONS, "{text}", {"text": "; ".join(found), "found": found})
        return self

    @property
    def state(self) -> Path | str:
        """Return the path or URL that `coordinator.store.state.Database` opens."""
        return self.store.url or self.round.directory / "state.db"

    def with_absolute_folder(self) -> "Config":
        """Return the same configuration with an absolute folder, so that child processes find it from anywhere."""
        place = self.round.model_copy(update={"directory": self.round.directory.absolute()})
        return self.model_copy(update={"round": place})


def contradictions(config: Config) -> list[str]:
    """Return every pair of settings that contradict each other, in words that name both."""
    found = []
    if config.reward.functions and config.task.name in BUILT_IN:
        found.append(
            f"task {config.task.name} judges by itself; reward.functions are for data, math, reasoning-gym and files"
        )
    if config.eval.every and 8 * config.eval.samples * config.sampling.max_new_tokens > limits.MESSAGE_MAX_BYTES // 2:
        found.append(
            f"eval.samples x sampling.max_new_tokens may be {limits.MESSAGE_MAX_BYTES // 16} at most: "
            "an answer must fit into one message"
        )
    if (config.objective.minibatches or 1) > config.learner.groups_per_update:
        found.append(
            f"objective.minibatches is {config.objective.minibatches}, but an update has only "
            f"{config.learner.groups_per_update} groups (learner.groups_per_update)"
        )
    if config.staleness.adaptive and config.correction.mode == "none":
        found.append("staleness.adaptive follows what the correction drops, and correction.mode is none")
    return found + _contradictions_of_payouts(config)


def _contradictions_of_payouts(config: Config) -> list[str]:
    payouts, found = config.payouts, []
    if find_rail_unit(payouts.rail, config.round.unit) is None:
        found.append(
            f"payouts.rail {payouts.rail} cannot pay in {config.round.unit} (round.unit); it pays in "
            f"{payable_units(payouts.rail)}"
        )
    if payouts.rail == "sepa":
        for name, check in (("sepa_name", check_holder), ("sepa_iban", check_iban)):
            try:
                check(getattr(payouts, name))
            except ValueError as error:
                found.append(f"payouts.rail sepa needs payouts.{name}: {error}")
    return found
