"""Whether the learner waits, why, and what to do about it: what an operator wants to know first.

- Pure: from the figures of the status to one sentence, which names the setting to turn.
- The plainest cause comes first: without a policy, a reward, a node, an auditor or money, nothing else matters.
  What remains, too few nodes or too tight a bound, is told by `health`.
- A learner that has ended, or is silent, neither works nor waits: it stands.
- Between two batches the learner also saves and publishes; only a share of its time says that it waited, or one wait
  that goes on for far longer than an update, a broadcast and a group take together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coordinator.config import Config
from coordinator.reports.health import IDLE_MAX, UPDATES_LATELY, verifier_alarm
from coordinator.transactions.fleet import WAITS_TOO_LONG
from coordinator.transactions.leases import terms_of
from protocol.text.plain import duration_text

State = Literal["starts", "works", "waits", "will wait", "stands", "finished"]


FIRST_WAIT_S = 600.0
"""While nothing is measured, a batch may take so long before that is called waiting."""

_TOO_FEW = (
    "Nodes are there, and too little comes of them: see what became of their work below, or hand out the join string "
    "to more."
)


@dataclass(frozen=True)
class LearnerWaiting:
    """How the learner is, and why."""

    state: State
    why: str


def explain_waiting(told: Mapping[str, Any], config: Config, *, backlog: int) -> LearnerWaiting:
    """What the figures of `summary.status` say of the learner while so many claims wait for an auditor."""
    if told["finished"]:
        return LearnerWaiting("finished", "The round is finished.")
    if told["learner_alarm"]:
        return LearnerWaiting("stands", told["learner_alarm"])
    if not told["version"]:
        place = config.round.directory / "logs" / "learner.log"
        return LearnerWaiting(
            "starts", f"No version is published yet: {told['phase']}. {place} says how far the learner is."
        )
    if cause := _nothing_comes(told, config, backlog):
        return LearnerWaiting("will wait" if told["batch"] > told["update"] else "waits", cause)
    waits_s, load = told["learner_waits_s"], told["load"] or {}
    cycle_s = sum(load.get(part, 0.0) for part in ("train_s", "broadcast_s", "rollout_s"))
    if waits_s > (WAITS_TOO_LONG * cycle_s + config.fleet.window_s if cycle_s else FIRST_WAIT_S):
        return LearnerWaiting(
            "waits", f"The learner has waited {duration_text(waits_s)} for batch {told['update'] + 1}. {_TOO_FEW}"
        )
    if not told["update"]:
        return LearnerWaiting("works", "No update is done yet: the first batch is being sampled, or trained on.")
    lately = told["learner_idle_share_lately"]
    if lately <= IDLE_MAX:
        return LearnerWaiting(
            "works", f"The learner waits {lately:.0%} of its time, over its last {UPDATES_LATELY} updates."
        )
    return LearnerWaiting("waits", told["alarm"] if told["load"] else _unmeasured(lately))


def _nothing_comes(told: Mapping[str, Any], config: Config, backlog: int) -> str:
    """Why no group can come any more, if none can."""
    if down := verifier_alarm(told["verifier"]):
        return down
    if not told["nodes_alive"]:
        return (
            "No node is there. Hand out the join string; if nodes came and left, raise "
            "market.max_price_micros_per_mtok, and see that others reach round.listen or round.public_url."
        )
    if backlog >= (most := config.audit.backlog_max):
        return (  # everybody reads it: no number that tells what was drawn
            f"So many claims wait for an auditor that no work is offered: audit.backlog_max = {most} or more. "
            "Start another `swarm-coordinator auditor`, or see logs/auditor.log."
        )
    dearest = terms_of(config).max_cost_micros(config.market.max_price_micros_per_mtok)
    if told["budget_micros"] < dearest:
        return (
            f"The budget is used up: {told['budget_micros']:,} micro-units are left, and one group may cost {dearest}. "
            "Lower market.max_price_micros_per_mtok or sampling.max_new_tokens, or end the round."
        )
    return ""


def _unmeasured(lately: float) -> str:
    return (
        f"The learner waits {lately:.0%} of its time; the cause is known once an update, a broadcast and a group "
        "have been measured."
    )
