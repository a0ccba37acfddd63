"""The fleet of a running round: its measurements, and the decision of `rules.fleet_choice` put into the store.

- T_train is the median of the last updates, T_bcast that of the last broadcasts. A node's rate comes from its
  leases that ended lately; its cost is its price today for the mean tokens of a recent group.
- Everything is read from the store at each decision, so a restart changes nothing.
- A node's claimed speed counts for no more than the highest measured rate: a false claim puts nobody out of work for
  long.
- Rates are estimates, and some nodes lie: when the learner has waited for too long, all nodes work.
- With γ = 0 and no hourly budget, and until the learner's first updates are timed, all nodes work.
- All functions are effects, `(connection, …) → outcome`.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import sqlalchemy as sa

from coordinator.config import Config
from coordinator.rules.capacity import VISIBLE, PoolLoad
from coordinator.rules.fleet_choice import (
    Change,
    Fleet,
    FleetCandidate,
    FleetRules,
    GroupRecord,
    Need,
    decide,
    measured_rate,
)
from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.tables import batches, fleet, is_for_training, leases, nodes, rollouts
from coordinator.transactions import broadcasts, registry, staleness_bound
from coordinator.transactions.leases import AT_WORK
from protocol.ids import NodeId
from protocol.work.lease import LeaseState

SINCE = Fact[list[float | None]]("fleet_since", [None, None])
"""The fact of the moments since which the fleet has been too small, and too dear."""

UPDATES_SEEN = 8
GROUPS_SEEN = 64
HALF_LIVES_SEEN = 4
"""Half-lives after which an answer is not read any more: its weight is a sixteenth of a new one's."""

WAITS_TOO_LONG = 2
"""The learner waits too long after this multiple of an update, a broadcast and a rollout, plus `fleet.window_s`."""

MICROS = 1_000_000

NO_SAMPLERS = ("mirroring", "resting")
"""Phases in which a node samples nothing, whatever its speed."""

SECONDS_MIN = 1e-3
"""The least time that a group takes."""


@dataclass(frozen=True)
class Groups:
    """The mean tokens and the median time of recent groups."""

    tokens: float
    seconds: float


def load(connection: sa.Connection, config: Config, *, alive_since_ms: int) -> PoolLoad | None:
    """Return the measured load of the round on its pool; None before the learner has made an update or two."""
    train_s = _median(
        connection,
        sa.select(batches.c.busy_s).where(batches.c.busy_s > 0).order_by(batches.c.batch.desc()).limit(UPDATES_SEEN),
    )
    groups = _groups(connection)
    if not train_s or groups is None:
        return None
    return PoolLoad(
        staleness=staleness_bound.in_force(connection, config.staleness),
        rollouts_per_update=config.learner.groups_per_update,
        train_s=train_s,
        broadcast_s=broadcasts.usual_s(connection, alive_since_ms=alive_since_ms),
        rollout_s=groups.seconds,
    )


def kappa(asked: PoolLoad | None, config: Config) -> int:
    """Return the updates between publications: the setting, or the most that costs no throughput as measured."""
    if asked is None or config.staleness.publish_every:
        return config.staleness.kappa
    return VISIBLE.kappa(asked)


def need(asked: PoolLoad, config: Config) -> Need:
    """Return the throughput needed, in groups/s; with γ = 0 it is infinite: all nodes that the budget allows work."""
    floor = VISIBLE.min_rate(asked, kappa(asked, config))
    return Need(floor, config.fleet.gamma * floor if config.fleet.gamma else math.inf)


def is_starved(connection: sa.Connection, asked: PoolLoad, config: Config, *, up_since_ms: int, now_ms: int) -> bool:
    """Return True if the learner's last batch is so long ago that the nodes at work must be slower than estimated."""
    formed_ms = connection.execute(sa.select(sa.func.max(batches.c.formed_ms))).scalar() or now_ms
    cycle_s = asked.train_s + asked.broadcast_s + asked.rollout_s
    return now_ms - max(formed_ms, up_since_ms) > 1000 * (WAITS_TOO_LONG * cycle_s + config.fleet.window_s)


def candidates(connection: sa.Connection, config: Config, *, silent_after_ms: int, now_ms: int) -> list[FleetCandidate]:
    """Return the live nodes that sample, with their rates and their costs in micro-units per second."""
    groups = _groups(connection)
    if groups is None:
        return []
    alive = registry.live_nodes(connection, silent_after_ms=silent_after_ms, now_ms=now_ms)
    half_life_s = config.fleet.half_life_s
    done = _work(connection, now_ms - int(1000 * HALF_LIVES_SEEN * half_life_s))
    sampling = (
        sa.select(nodes).where(nodes.c.node_id.in_(alive), nodes.c.phase.not_in(NO_SAMPLERS)).order_by(nodes.c.node_id)
    )
    rate_of = partial(measured_rate, now_s=now_ms / 1000, half_life_s=half_life_s)
    fastest = max([1 / max(groups.seconds, SECONDS_MIN), *(rate_of(0.0, work) for work in done.values())])
    measured = []
    for row in connection.execute(sampling):
        rate = rate_of(min(fastest, row.tokens_per_s / groups.tokens), done.get(row.node_id, ()))
        measured.append(FleetCandidate(row.node_id, rate, rate * groups.tokens * row.price_micros_per_mtok / MICROS))
    return measured


def steer(
    connection: sa.Connection, config: Config, *, silent_after_ms: int, up_since_ms: int, now_ms: int
) -> list[Change]:
    """Decide which nodes work from now on, and return the changes.

    After a start of the coordinator nothing is decided for `silent_after_ms`, so that all nodes can report first.
    """
    if 0 <= now_ms - up_since_ms < silent_after_ms:
        return []
    cap_micros = config.fleet.budget_micros_per_hour
    is_wanted = config.fleet.gamma or cap_micros
    asked = load(connection, config, alive_since_ms=now_ms - silent_after_ms) if is_wanted else None
    if asked is None:
        connection.execute(sa.delete(fleet))
        return []
    pool = candidates(connection, config, silent_after_ms=silent_after_ms, now_ms=now_ms)
    rules = FleetRules(
        window_s=config.fleet.window_s,
        margin=config.fleet.margin,
        dwell_s=config.fleet.dwell_s,
        cost_cap=cap_micros / 3600 if cap_micros else math.inf,
    )
    before = _stored(connection, pool)
    everybody = Need(math.inf, math.inf)
    starved = is_starved(connection, asked, config, up_since_ms=up_since_ms, now_ms=now_ms)
    wanted = everybody if starved else need(asked, config)
    after, changes = decide(before, pool, wanted, rules, now_s=now_ms / 1000)
    _store(connection, after, pool, {change.name: change.reason for change in changes}, now_ms)
    return changes


def list_nodes(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return whether each node works, and the reason, those at work first."""
    rows = connection.execute(
        sa.select(fleet, nodes.c.name)
        .join_from(fleet, nodes, nodes.c.node_id == fleet.c.node_id)
        .order_by(fleet.c.works.desc(), fleet.c.node_id)
    ).mappings()
    return [dict(row) for row in rows]


def _stored(connection: sa.Connection, pool: list[FleetCandidate]) -> Fleet:
    """Return the stored fleet; before the first decision, all nodes work."""
    rows = connection.execute(sa.select(fleet)).all()
    if not rows:
        return Fleet(working=frozenset(node.name for node in pool))
    short_since, dear_since = get_fact(connection, SINCE)
    return Fleet(
        working=frozenset(row.node_id for row in rows if row.works),
        since={row.node_id: row.since_ms / 1000 for row in rows},
        short_since=short_since,
        dear_since=dear_since,
    )


def _store(
    connection: sa.Connection, after: Fleet, pool: list[FleetCandidate], reasons: Mapping[str, str], now_ms: int
) -> None:
    before = {row.node_id: row for row in connection.execute(sa.select(fleet))}
    rows = []
    for node in pool:
        works, known = node.name in after.working, before.get(node.name)
        if known is not None and known.works == works:
            since_ms, reason = min(now_ms, known.since_ms), known.reason
        else:
            since_ms, reason = now_ms, reasons.get(node.name, "it was there" if works else "it is not needed yet")
        rows.append(
            {
                "node_id": node.name,
                "works": works,
                "since_ms": since_ms,
                "reason": reason,
                "groups_per_s": node.rate,
                "cost_micros_per_s": node.cost,
            }
        )
    connection.execute(sa.delete(fleet))
    if rows:
        connection.execute(sa.insert(fleet), rows)
    set_fact(connection, SINCE, [after.short_since, after.dear_since])


def _groups(connection: sa.Connection) -> Groups | None:
    lately = (
        sa.select(rollouts.c.tokens, leases.c.ended_ms - leases.c.issued_ms)
        .join_from(rollouts, leases, rollouts.c.lease_id == leases.c.lease_id)
        .where(leases.c.ended_ms.is_not(None), is_for_training(leases.c.group_no))
        .order_by(leases.c.ended_ms.desc())
        .limit(GROUPS_SEEN)
    )
    seen = connection.execute(lately).all()
    if not seen:
        return None
    tokens = sum(row[0] for row in seen) / len(seen)
    # A clock that was set back makes no time negative.
    return Groups(tokens=max(1.0, tokens), seconds=max(0.0, median(row[1] for row in seen)) / 1000)


def _work(connection: sa.Connection, since_ms: int) -> dict[NodeId, list[GroupRecord]]:
    """Return the records of the leases that ended since `since_ms`, by node."""
    done: defaultdict[NodeId, list[GroupRecord]] = defaultdict(list)
    ended = sa.select(leases.c.node_id, leases.c.issued_ms, leases.c.ended_ms, leases.c.state).where(
        leases.c.ended_ms >= since_ms, leases.c.state.in_(AT_WORK)
    )
    for node_id, issued_ms, ended_ms, state in connection.execute(ended):
        done[NodeId(node_id)].append(GroupRecord(issued_ms / 1000, ended_ms / 1000, state == LeaseState.ACCEPTED.value))
    return done


def _median(connection: sa.Connection, column: sa.Select[Any]) -> float | None:
    values = connection.execute(column).scalars().all()
    return median(values) if values else None
