"""Curves of the training: the learner's metrics, the cost of an update, the age of its groups, and each version's
broadcast with its senders and receivers.

- A report never changes, so `Curves` keeps it in memory and reads only new ones; a restart reads all of them again.
- A curve of many points is thinned to the means of equal stretches, so a page is as large after a year as after a day.
- The picture of a broadcast shows what receivers signed, not what was planned.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite

import sqlalchemy as sa

from coordinator.reports import health
from coordinator.store.tables import batches, broadcasts, nodes, receipts, rollouts, uploads, versions
from coordinator.transactions.broadcasts import ENDED_MS

POINTS_MAX = 100
METRICS_MAX = 64
"""The most metrics of the learner that get a curve: the reward, then the others in alphabetical order."""

REWARD = "reward/mean"
TREE_NODES_MAX = 150

Point = tuple[float, float]


@dataclass(frozen=True)
class Update:
    """An update of the learner, as the learner reported it."""

    number: int
    idle_s: float
    busy_s: float
    max_staleness: int
    credit_micros: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class BroadcastSpread:
    """The broadcast of one version, over the nodes that it reached."""

    version: int
    nodes: int
    seconds: list[float]

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def max_s(self) -> float | None:
        return max(self.seconds, default=None)


class Curves:
    """The updates so far; `read` adds new ones."""

    def __init__(self) -> None:
        self.updates: list[Update] = []

    def read(self, connection: sa.Connection) -> None:
        last = self.updates[-1].number if self.updates else 0
        new = (batches.c.batch > last) & batches.c.reported_ms.is_not(None)
        credited = (
            sa.select(rollouts.c.batch, sa.func.sum(rollouts.c.credit_micros))
            .where(rollouts.c.batch > last)
            .group_by(rollouts.c.batch)
        )
        costs = {batch: int(micros) for batch, micros in connection.execute(credited)}
        for row in connection.execute(sa.select(batches).where(new).order_by(batches.c.batch)):
            self.updates.append(
                Update(row.batch, row.idle_s, row.busy_s, row.max_staleness, costs.get(row.batch, 0), row.metrics)
            )

    def metrics(self) -> dict[str, list[Point]]:
        """Return a curve for each metric that the learner reports, the reward first."""
        curves: defaultdict[str, list[Point]] = defaultdict(list)
        for update in self.updates:
            for name, value in update.metrics.items():
                if isfinite(value):
                    curves[name].append((update.number, value))
        names = sorted(curves, key=lambda name: (name != REWARD, name))[:METRICS_MAX]
        return {name: thinned(curves[name]) for name in names}

    def idle_share(self) -> list[Point]:
        """Return the share of its time that the learner waited, by update."""
        points = thinned([(update.number, update.idle_s) for update in self.updates])
        busy = thinned([(update.number, update.busy_s) for update in self.updates])
        return [(x, idle / (idle + work)) for (x, idle), (_, work) in zip(points, busy, strict=True) if idle + work > 0]

    def cost_micros(self) -> list[Point]:
        """Return the credit of each update's groups."""
        return thinned([(update.number, update.credit_micros) for update in self.updates])


def thinned(points: Sequence[Point], most: int = POINTS_MAX) -> list[Point]:
    """Return at most `most` points, each the mean of a stretch."""
    stride = max(1, ceil(len(points) / most))
    parts = (points[start : start + stride] for start in range(0, len(points), stride))
    return [(part[-1][0], statistics.fmean(y for _, y in part)) for part in parts]


def published(connection: sa.Connection) -> dict[float, str]:
    """Return the versions by the update that they contain, the oldest first."""
    rows = connection.execute(sa.select(versions.c.version, versions.c.policy_update).order_by(versions.c.version))
    return {float(row.policy_update): f"version {row.version}" for row in rows}


def ages(connection: sa.Connection) -> list[Point]:
    """Return the number of groups that were trained on at each age, in updates."""
    return [(age, float(count)) for age, count in sorted(health.trained_ages(connection).items())]


def spreads(connection: sa.Connection) -> list[BroadcastSpread]:
    """Return the broadcasts of all versions, the oldest first."""
    took_s = (ENDED_MS - versions.c.published_ms) / 1000.0
    rows = connection.execute(
        sa.select(broadcasts.c.version, took_s)
        .join_from(broadcasts, versions, versions.c.version == broadcasts.c.version)
        .join(nodes, nodes.c.node_id == broadcasts.c.node_id)
        .order_by(broadcasts.c.version)
    )
    seconds_of: defaultdict[int, list[float | None]] = defaultdict(list)
    for version, took in rows:
        seconds_of[version].append(took)
    return [
        BroadcastSpread(version, len(times), [float(took) for took in times if took is not None])
        for version, times in seconds_of.items()
    ]


@dataclass(frozen=True)
class Branch:
    """A node in the tree of a broadcast; `parent` sent it the most bytes, and "" is the seeder."""

    node_id: str
    name: str
    parent: str
    size_bytes: int


def tree(connection: sa.Connection, version: int) -> list[Branch]:
    """Return the receivers of a version in the order in which they completed it, each with its largest sender.

    Nodes send to each other both ways. A parent must have completed the version earlier, so the result is a tree.
    """
    done_ms = sa.func.coalesce(broadcasts.c.fetched_ms, receipts.c.received_ms).label("done_ms")
    receivers = connection.execute(
        sa.select(nodes.c.node_id, nodes.c.name, done_ms)
        .join_from(receipts, nodes, nodes.c.node_id == receipts.c.receiver)
        .outerjoin(
            broadcasts, (broadcasts.c.version == receipts.c.version) & (broadcasts.c.node_id == receipts.c.receiver)
        )
        .where(receipts.c.version == version)
        .order_by(done_ms, nodes.c.node_id)
        .limit(TREE_NODES_MAX)
    ).all()
    places = {row.node_id: place for place, row in enumerate(receivers)}
    from_whom: dict[str, tuple[int, str]] = {}
    for row in connection.execute(sa.select(uploads).where(uploads.c.version == version)):
        place, above = places.get(row.receiver), places.get(row.sender, -1)
        if place is not None and above < place:
            sender = row.sender if row.sender in places else ""
            from_whom[row.receiver] = max((row.size_bytes, sender), from_whom.get(row.receiver, (0, "")))
    return [Branch(row.node_id, row.name, *from_whom.get(row.node_id, (0, ""))[::-1]) for row in receivers]
