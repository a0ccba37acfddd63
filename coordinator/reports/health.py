"""Health figures of a round, and an alarm that names the cause of a problem and the setting that cures it.

- Age: the age in updates of the groups that the learner trained on.
- Wasted (`in_vain`): groups that a node worked on and that were not trained on, by the reason.
- `length_bias`: the mean time that nodes worked on groups that came too late, divided by that of groups that were
  trained on. Far above 1, long answers are lost, and the policy learns to be short.
- A wait that still goes on counts like one that has ended.
- All figures are read from the store, so a restart loses none.
- An alarm is a call to act: a finished round raises none, and its figures stay.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from coordinator.reports import alarms, learned
from coordinator.rules.capacity import VISIBLE, PoolLoad, least_staleness
from coordinator.rules.lifecycle import RolloutState
from coordinator.store.facts import FINISHED, Fact, get_fact
from coordinator.store.tables import batches, leases, rollouts
from coordinator.transactions import reward_columns, scoring, standings
from protocol.errors import StaleVersion
from protocol.work.lease import LeaseState

UPDATES_LATELY = 32
"""The number of last updates whose idle share may raise the alarm."""

IDLE_MAX = 0.1

SKIPPED = "learner/skipped"
EMPTY = "learner/empty"
SKIPPED_MAX = 3
"""Single gradients that are not finite are normal; many in a row mean that the weights are lost."""

MASKED = "is/masked_frac"
MASKED_MAX = 0.1
MASKED_UPDATES = 8
"""The number of last updates over which the dropped share is averaged; fewer updates raise no alarm."""

OUTGOING_S = "learner/outgoing_s"

IN_VAIN_MAX = 0.1
IN_VAIN_FROM = 16
"""The least number of groups, trained on or not, that an alarm for wasted work rests on."""

LENGTH_BIAS_MAX = 1.5
LATE_MIN = 0.02
"""The least share of groups that come too late: below it, the bias of their lengths is not significant."""

IN_BUFFER = "stale_in_buffer"
SURPLUS = "surplus"

KEPT = Fact[Mapping[str, int]]("kept_for_audits", {"size_bytes": 0, "room_bytes": 0})
"""The fact with the size of the versions that only audits and evaluations need, and the limit of that size."""

KEPT_MAX = 0.8

ADVICE = {
    LeaseState.EXPIRED.value: "set a longer leases.timeout_s, or lower leases.groups_per_request",
    StaleVersion.code: "raise staleness.max_updates, or publish more often by staleness.publish_every",
    IN_BUFFER: "raise staleness.max_updates",
    SURPLUS: "lower leases.over_issue",
    reward_columns.GIVEN_UP: "fix the reward; the incidents on the training page show the errors",
}


def figures(
    connection: sa.Connection,
    asked: PoolLoad | None,
    kappa: int,
    *,
    staleness_max: int = 0,
    programs_alarm: str = "",
    waits_s: float = 0.0,
    compares_groups: bool = True,
    external: bool = False,
) -> dict[str, Any]:
    """Return the figures of the round's health; the learner has waited for its next batch for `waits_s`.

    `staleness_max` is the operator's bound; the bound in force may be lower. `compares_groups` is a property of the
    round's objective. In a round of other trainers (`external`) no work counts as wasted: they do not say what they
    use.
    """
    ages, in_vain, idle_share = trained_ages(connection), _in_vain(connection), _idle_lately(connection, waits_s)
    kept = get_fact(connection, KEPT)
    lately = _metrics_lately(connection)
    skipped, masked = sum(bool(metrics.get(SKIPPED, 0)) for metrics in lately), _masked_share(lately)
    trained, verifier, bias = ages.total(), scoring.trouble(connection), _length_bias(connection)
    ended = trained + in_vain.total()
    share = 0.0 if external else in_vain.total() / max(1, ended)
    found = alarms.raised(
        ()
        if get_fact(connection, FINISHED)
        else (
            ("program_ended", programs_alarm),
            ("no_rewards", verifier_alarm(verifier)),
            ("updates_skipped", skipped_alarm(skipped, len(lately))),
            ("claims_held", held_alarm(standings.count_held_claims(connection))),
            ("versions_kept", kept_alarm(kept)),
            ("tokens_dropped", masked_alarm(masked)),
            ("learner_waits", alarm(asked, kappa, idle_share, Counter(), 0.0, staleness_max)),
            ("work_wasted", alarm(None, kappa, 0.0, in_vain, share) if ended >= IN_VAIN_FROM else ""),
            ("long_answers_lost", _bias_alarm(bias, in_vain, trained) if ended >= IN_VAIN_FROM else ""),
            *learned.alarms(lately, compares_groups=compares_groups),
        )
    )
    return {
        "age": {
            "mean": sum(age * count for age, count in ages.items()) / max(1, trained),
            "p99": percentile(ages, 0.99),
            "max": max(ages, default=0),
        },
        "in_vain": dict(in_vain),
        "in_vain_share": share,
        "length_bias": bias,
        "learner_idle_share_lately": idle_share,
        "learner_outgoing_share_lately": _outgoing_lately(connection),
        "learned": learned.figures(lately),
        "updates_skipped_lately": skipped,
        "updates_empty_lately": sum(bool(metrics.get(EMPTY, 0)) for metrics in lately),
        "masked_share_lately": masked,
        "verifier": verifier,
        KEPT.name: kept,
        "alarms": found,
        "alarm": found[0]["text"] if found else "",
    }


def verifier_alarm(verifier: Mapping[str, Any]) -> str:
    """Return the alarm for a reward that cannot judge groups, which is the most important one; "" if it can."""
    if not verifier.get("down"):
        return ""
    next_step = verifier.get("next_step") or (
        "Fix the reward: it is tried again every few seconds. The output of `launch` has the whole message."
    )
    return f"No rewards: {verifier['reason']} Groups wait and are not lost. {next_step}"


def skipped_alarm(skipped: int, seen: int) -> str:
    """Return the alarm for updates that are paid for and change nothing; "" if updates make steps."""
    if skipped <= SKIPPED_MAX:
        return ""
    return (
        f"{skipped} of the last {seen} updates changed nothing, since their gradient was not finite, and their groups "
        "were paid for. Lower learner.learning_rate or fix the reward, and go back to an earlier version: "
        "`swarm-coordinator policy rollback`."
    )


def masked_alarm(share: float | None) -> str:
    """Return the alarm for paid samples that are too far from the policy to train on; "" if they are few."""
    if share is None or share <= MASKED_MAX:
        return ""
    return (
        f"The correction dropped {share:.0%} of the tokens of the last {MASKED_UPDATES} updates: their samples are too "
        "far from the policy. Lower learner.learning_rate or staleness.max_updates, or widen "
        "correction.sequence_low and correction.sequence_high."
    )


def held_alarm(held: dict[str, int]) -> str:
    """Return the alarm for claims that wait for a calibration, whose nodes get no more work; "" if none do."""
    if not held:
        return ""
    classes = ", ".join(held)
    return (
        f"{sum(held.values())} claims are held unpaid: no tolerances of {classes} were measured on this policy yet. "
        "This counts as no fault; nodes of such a class get no more work until then. Run a node of it yourself, add "
        "its id to audit.probes and launch again (not needed for fleet.local_nodes), or run "
        f"`swarm-coordinator calibrate FILE.toml --node NODE --class {next(iter(held))}`."
    )


def kept_alarm(kept: Mapping[str, int]) -> str:
    """Return the alarm for versions that may be deleted before their claims are audited; "" if there are none."""
    size, room = kept["size_bytes"], kept["room_bytes"]
    if not size or size < KEPT_MAX * room:
        return ""
    return (
        f"Versions that claims wait for take {size / 2**30:.2f} of {room / 2**30:.2f} GiB; beyond that the oldest are "
        "deleted and their claims pardoned. Start another auditor, free disk space, or raise audit.kept_gib."
    )


def alarm(
    asked: PoolLoad | None,
    kappa: int,
    idle_share: float,
    in_vain: Counter[str],
    in_vain_share: float,
    staleness_max: int = 0,
) -> str:
    """Return the alarm for idle time or wasted work, with its cause and the setting to change; "" if there is none."""
    if asked is not None and idle_share > IDLE_MAX:
        return _why_idle(asked, kappa, idle_share, staleness_max)
    if in_vain_share > IN_VAIN_MAX:
        (most, _), *_ = in_vain.most_common(1)
        advice = ADVICE.get(most, "docs/protocol.md says what this code means")
        return f"{in_vain_share:.0%} of the work is wasted, most of it as {most}: {advice}."
    return ""


def _bias_alarm(bias: float | None, in_vain: Counter[str], trained: int) -> str:
    """Return the alarm for long answers that are lost more often than short ones; "" if they are not."""
    late = sum(in_vain[why] for why in (LeaseState.EXPIRED.value, StaleVersion.code, IN_BUFFER))
    if bias is None or bias <= LENGTH_BIAS_MAX or late < LATE_MIN * (late + trained):
        return ""
    return (
        f"Groups that come too late take {bias:.1f} times as long as those that are trained on, so the policy "
        "learns to be short: raise staleness.max_updates, or set a longer leases.timeout_s."
    )


def percentile(ages: Counter[int], share: float) -> int:
    """Return the smallest age that at least `share` of the groups does not exceed."""
    below = 0
    for age in sorted(ages):
        below += ages[age]
        if below >= share * ages.total():
            return age
    return 0


def _why_idle(asked: PoolLoad, kappa: int, idle_share: float, staleness_max: int) -> str:
    waits = f"The learner waits {idle_share:.0%} of its time: "
    # The idle share that would remain with infinitely fast nodes comes from the staleness bound.
    if VISIBLE.bubble(asked, kappa, math.inf) < idle_share / 2:
        needed = asked.rollouts_per_update / asked.train_s
        return waits + (
            f"nodes gave {needed * (1 - idle_share):.3g} of {needed:.3g} groups/s. More nodes on other machines "
            "are needed, or a higher fleet.gamma or market.max_price_micros_per_mtok."
        )
    enough = least_staleness(asked, kappa)
    if asked.rollout_s > asked.broadcast_s:
        what, cure = f"rollouts of {asked.steps_per_rollout:.1f} steps", "shorten them by sampling.max_new_tokens"
    else:
        what, cure = f"broadcasts of {asked.steps_per_broadcast:.1f} steps", "lower staleness.publish_every"
    waits += f"S = {asked.staleness} is too small for {what}: "
    if asked.staleness < staleness_max:
        return waits + (
            f"the bound adapts, and may rise to {staleness_max} once the correction drops few tokens. Lower "
            f"learner.learning_rate, raise staleness.min_updates, or {cure}."
        )
    return waits + f"raise staleness.max_updates to {enough}, or {cure}."


def trained_ages(connection: sa.Connection) -> Counter[int]:
    age = rollouts.c.batch - 1 - rollouts.c.policy_update
    counts = sa.select(age, sa.func.count()).where(rollouts.c.batch.is_not(None)).group_by(age)
    return Counter({int(age): int(count) for age, count in connection.execute(counts)})


def _in_vain(connection: sa.Connection) -> Counter[str]:
    """Count wasted work by its reason: leases that were refused or expired, and accepted groups that were not used."""
    refused = sa.select(leases.c.code, sa.func.count()).where(leases.c.state == LeaseState.REJECTED.value)
    counts = Counter({code: int(count) for code, count in connection.execute(refused.group_by(leases.c.code))})
    ends = (
        (LeaseState.EXPIRED.value, leases, LeaseState.EXPIRED.value),
        (IN_BUFFER, rollouts, RolloutState.STALE),
        (SURPLUS, rollouts, SURPLUS),
        (reward_columns.GIVEN_UP, rollouts, reward_columns.GIVEN_UP),
    )
    for name, table, state in ends:
        ended = sa.select(sa.func.count()).select_from(table).where(table.c.state == state)
        counts[name] = connection.execute(ended).scalar_one()
    return +counts


def _metrics_lately(connection: sa.Connection) -> list[dict[str, float]]:
    """Return the metrics of the last updates, the newest first."""
    lately = sa.select(batches.c.metrics).where(batches.c.reported_ms.is_not(None)).order_by(batches.c.batch.desc())
    return [metrics or {} for metrics in connection.execute(lately.limit(UPDATES_LATELY)).scalars()]


def _masked_share(lately: list[dict[str, float]]) -> float | None:
    """Return the share of tokens dropped lately; None until enough updates were reported."""
    shares = [float(metrics[MASKED]) for metrics in lately[:MASKED_UPDATES] if MASKED in metrics]
    return sum(shares) / len(shares) if len(shares) == MASKED_UPDATES else None


def _idle_lately(connection: sa.Connection, waits_s: float) -> float:
    """Return the learner's idle share lately: 1 while it waits for its first batch, 0 before it asks for that."""
    lately = (
        sa.select(batches.c.idle_s, batches.c.busy_s)
        .where(batches.c.busy_s > 0)
        .order_by(batches.c.batch.desc())
        .limit(UPDATES_LATELY)
    )
    rows = connection.execute(lately).all()
    idle_s, busy_s = (sum(row[place] for row in rows) for place in (0, 1))
    idle_s += waits_s
    return idle_s / (idle_s + busy_s) if idle_s + busy_s else 0.0


def _outgoing_lately(connection: sa.Connection) -> float:
    """Return the share of the last updates' time in which the learner stopped to save and publish versions."""
    lately = (
        sa.select(batches.c.idle_s + batches.c.busy_s, batches.c.metrics)
        .where(batches.c.busy_s > 0)
        .order_by(batches.c.batch.desc())
        .limit(UPDATES_LATELY)
    )
    rows = connection.execute(lately).all()
    all_s, stood_s = sum(row[0] for row in rows), sum((row[1] or {}).get(OUTGOING_S, 0.0) for row in rows)
    return min(1.0, stood_s / all_s) if all_s else 0.0


def _length_bias(connection: sa.Connection) -> float | None:
    """Return `length_bias`; None while there is nothing to compare."""
    worked_ms = sa.func.avg(leases.c.ended_ms - leases.c.issued_ms)
    aged = sa.select(rollouts.c.lease_id).where(rollouts.c.state == RolloutState.STALE.value)
    late = (
        (leases.c.code == StaleVersion.code)
        | (leases.c.state == LeaseState.EXPIRED.value)
        | leases.c.lease_id.in_(aged)
    )
    late_ms = connection.execute(sa.select(worked_ms).where(late)).scalar()
    if not late_ms:
        return None
    by_rollout = sa.select(worked_ms).join_from(leases, rollouts, rollouts.c.lease_id == leases.c.lease_id)
    trained_ms = connection.execute(by_rollout.where(rollouts.c.batch.is_not(None))).scalar()
    return float(late_ms) / float(trained_ms) if trained_ms else None
