"""The state of the learner, its cause and the remedy: the first thing that an operator wants to know.

- Pure: from the figures of the status to one sentence, which names the setting to change.
- The simplest cause comes first: without a policy, a reward, a node, an auditor or money, nothing else matters.
  `health` explains the others: too few nodes, or too small a staleness bound.
- A learner that has ended, or sends nothing, neither works nor waits: its state is "stands".
- Between two batches the learner also saves and publishes. It counts as waiting only if its idle share is high, or if
  one wait is far longer than an update, a broadcast and a group take together.
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
"""The longest wait for a batch that does not count as waiting, while no times are measured."""

_TOO_FEW = (
    "Nodes are connected, but too few of their groups arrive: see the outcome of their work below, or give the join "
    "string to more people."
)

_HELD = (
    "No batch is formed until the result of `swarm-coordinator retract` is published. If no retraction is under way, "
    "its order failed: see the coordinator's log, or repeat the command."
)


@dataclass(frozen=True)
class LearnerWaiting:
    """The state of the learner, and its cause."""

    state: State
    why: str


def explain_waiting(told: Mapping[str, Any], config: Config, *, backlog: int, is_held: bool = False) -> LearnerWaiting:
    """Return the learner's state by the figures of `summary.status`; `backlog` claims wait for an auditor.

    `is_held` is True while no batch is formed, for a retraction.
    """
    if told["finished"]:
        return LearnerWaiting("finished", "The round is finished.")
    if told["learner_alarm"]:
        return LearnerWaiting("stands", told["learner_alarm"])
    if not told["version"]:
        place = config.round.directory / "logs" / "learner.log"
        return LearnerWaiting(
            "starts", f"No version is published yet: {told['phase']}. See {place} for the learner's progress."
        )
    if cause := _HELD if is_held else _nothing_comes(told, config, backlog):
        return LearnerWaiting("will wait" if told["batch"] > told["update"] else "waits", cause)
    if config.learner.external:
        return LearnerWaiting(
            "works", f"Versions come from a trainer with a key: the newest is of update {told['version_update']}."
        )
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
        return LearnerWaiting("works", f"The learner waits {lately:.0%} of its time, over its {_updates_lately(told)}.")
    return LearnerWaiting("waits", told["alarm"] if told["load"] else _unmeasured(lately, told))


def _nothing_comes(status: Mapping[str, Any], config: Config, backlog: int) -> str:
    """Return the cause if no group can come any more; "" if groups can come."""
    if down := verifier_alarm(status["verifier"]):
        return down
    if not status["nodes_alive"]:
        return (
            "No node is connected. Give the join string to others; if nodes came and left, raise "
            "market.max_price_micros_per_mtok, and check that others can reach round.listen or round.public_url."
        )
    if status["nodes_alive"] == status["nodes_paused_alive"]:
        return (
            "No node works: the operator has paused every node that is connected. "
            "`swarm-coordinator nodes resume` with the name of a node ends its pause."
        )
    if backlog >= (most := config.audit.backlog_max):
        return (  # public: it has no number that reveals which claims were drawn for an audit
            f"No work is offered, because audit.backlog_max = {most} claims or more wait for an auditor. "
            "Start another `swarm-coordinator auditor`, or see logs/auditor.log."
        )
    dearest = terms_of(config).max_cost_micros(config.market.dearest_micros_per_mtok)
    unit = config.round.money
    if status["budget_micros"] < dearest:
        return (
            f"The budget is used up: {unit.exact(status['budget_micros'])} are left, and a group may cost "
            f"{unit.exact(dearest)}. "
            "Lower market.max_price_micros_per_mtok or sampling.max_new_tokens, or end the round."
        )
    return ""


def _updates_lately(status: Mapping[str, Any]) -> str:
    count = min(UPDATES_LATELY, status["update"])
    return "last update" if count == 1 else f"last {count} updates"


def _unmeasured(lately: float, status: Mapping[str, Any]) -> str:
    return (
        f"The learner waits {lately:.0%} of its time, over its {_updates_lately(status)}; the cause is known "
        "once an update, a broadcast and a group have been measured."
    )
