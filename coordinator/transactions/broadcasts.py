"""Broadcasts of the last versions: T_bcast, from a version's publication to a node's first token sampled under it.

- A broadcast goes to the nodes that are alive when a version is published; nodes that join later are not part of it.
- Nodes report how long ago they reached a stage, and their first report counts. The coordinator subtracts that from
  its own time, so it trusts no other clock. The transfer time of the message is added, and no stage is reached before
  publication.
- A broadcast ends for a node with its first token; for a mirror, which samples nothing, when its files are whole.
- In a round with a trainer of its own (learner.external), nodes may wait for the trainer's requests, so a broadcast
  ends when the engine has the version: that time is recorded as the time of the first token.
- A time in which the coordinator was started contains its outage: it is shown, and does not count for `usual_s`.
- A node may lie about itself, and gains nothing by it.
- All functions are effects, `(connection, …) → outcome`.
"""

import statistics
from collections.abc import Iterable
from typing import Any, get_args

import sqlalchemy as sa

from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.tables import broadcasts, is_alive, nodes, receipts, uploads, versions
from coordinator.transactions import policy_versions, registry
from coordinator.transactions.links import VERSIONS_KEPT
from protocol.ids import NodeId
from protocol.policy.manifest import PolicyManifest
from protocol.work.messages import Reached, Stage

STAGES: dict[Stage, sa.Column[int]] = {stage: broadcasts.c[f"{stage}_ms"] for stage in get_args(Stage)}

STARTS = Fact[list[int]]("starts_ms", [])
"""The fact of the times of the coordinator's last starts, the oldest first."""

STARTS_KEPT = 16
"""Far more starts than the last versions have in any round but one that fails at once, which publishes nothing."""

ENDED_MS = sa.case((nodes.c.phase == "mirroring", broadcasts.c.fetched_ms), else_=broadcasts.c.first_token_ms)
"""The time when a broadcast ended for a node."""


def record_start(connection: sa.Connection, now_ms: int) -> None:
    """Record a start of the coordinator."""
    set_fact(connection, STARTS, [*get_fact(connection, STARTS), now_ms][-STARTS_KEPT:])


def start_broadcast(
    connection: sa.Connection, manifest: PolicyManifest, digest: str, *, silent_after_ms: int, now_ms: int
) -> None:
    """Record a version as published to the nodes that are alive now; the same version again changes nothing."""
    newest, _ = policy_versions.newest_version(connection)
    policy_versions.record(connection, manifest, digest, now_ms=now_ms)
    if manifest.version <= newest:
        return
    live = registry.live_nodes(connection, silent_after_ms=silent_after_ms, now_ms=now_ms)
    if live:
        connection.execute(
            sa.insert(broadcasts), [{"version": manifest.version, "node_id": node_id} for node_id in live]
        )
    connection.execute(sa.delete(broadcasts).where(broadcasts.c.version <= manifest.version - VERSIONS_KEPT))


def record_progress(
    connection: sa.Connection, node: NodeId, reached: Iterable[Reached], *, now_ms: int, external: bool = False
) -> None:
    """Record the stages that a node of a broadcast has reached, unless it has reported them before."""
    stages = [(said, said.stage) for said in reached]
    if external:
        stages += [(said, "first_token") for said, stage in stages if stage == "loaded"]
    for said, stage in stages:
        column = STAGES[stage]
        reached_ms = now_ms - round(1000 * said.ago_s)
        published_ms = sa.select(versions.c.published_ms).where(versions.c.version == said.version).scalar_subquery()
        connection.execute(
            sa.update(broadcasts)
            .where(broadcasts.c.version == said.version, broadcasts.c.node_id == node, column.is_(None))
            .values({column: sa.case((published_ms > reached_ms, published_ms), else_=reached_ms)})
        )


def shown_version(connection: sa.Connection, *, alive_since_ms: int) -> int | None:
    """Return the newest version that is sampled from; the newest of all counts once every live node holds it."""
    return next(iter(_settled(connection, alive_since_ms)), None)


def _settled(connection: sa.Connection, alive_since_ms: int) -> list[int]:
    """Return the versions that are sampled from, the newest first."""
    newest, _ = policy_versions.newest_version(connection)
    behind = is_alive(alive_since_ms) & (nodes.c.version < broadcasts.c.version)
    settled = (
        sa.select(broadcasts.c.version)
        .join(nodes, nodes.c.node_id == broadcasts.c.node_id)
        .group_by(broadcasts.c.version)
        .having(sa.func.count(ENDED_MS) > 0)
        .having((broadcasts.c.version < newest) | (sa.func.sum(sa.case((behind, 1), else_=0)) == 0))
        .order_by(broadcasts.c.version.desc())
    )
    return list(connection.execute(settled).scalars())


def usual_s(connection: sa.Connection, *, alive_since_ms: int) -> float:
    """Return the usual T_bcast: the median over the last versions of their medians; 0 before the first.

    Of two versions the quicker one counts, so that no single broadcast sets a figure on which advice rests.
    """
    starts = get_fact(connection, STARTS)
    ended = (
        sa.select(broadcasts.c.version, versions.c.published_ms, ENDED_MS)
        .join_from(broadcasts, versions, versions.c.version == broadcasts.c.version)
        .join(nodes, nodes.c.node_id == broadcasts.c.node_id)
        .where(broadcasts.c.version.in_(_settled(connection, alive_since_ms)), ENDED_MS.is_not(None))
    )
    seconds: dict[int, list[float]] = {}
    for version, published_ms, ended_ms in connection.execute(ended):
        if not any(published_ms < start_ms <= ended_ms for start_ms in starts):
            seconds.setdefault(version, []).append((ended_ms - published_ms) / 1000)
    return statistics.median_low(map(statistics.median, seconds.values())) if seconds else 0.0


def summary(connection: sa.Connection, *, alive_since_ms: int) -> dict[str, Any] | None:
    """Return T_bcast of the version to be shown; None before the first."""
    version = shown_version(connection, alive_since_ms=alive_since_ms)
    return None if version is None else spread(connection, version)


def spread(connection: sa.Connection, version: int) -> dict[str, Any] | None:
    """Return T_bcast of a version over the nodes that it has reached; None before it reached one, or long after."""
    ended = connection.execute(
        sa.select(_since_publication(ENDED_MS))
        .join_from(broadcasts, versions, versions.c.version == broadcasts.c.version)
        .join(nodes, nodes.c.node_id == broadcasts.c.node_id)
        .where(broadcasts.c.version == version)
    )
    seconds: list[float | None] = list(ended.scalars())
    reached_s = sorted(took_s for took_s in seconds if took_s is not None)
    if not reached_s:
        return None
    return {
        "version": version,
        "nodes": len(seconds),
        "reached": len(reached_s),
        "median_s": statistics.median(reached_s),
        "p90_s": reached_s[-(-9 * len(reached_s) // 10) - 1],
        "max_s": reached_s[-1],
    }


def by_node(connection: sa.Connection, version: int) -> list[dict[str, Any]]:
    """Return each node's part in a broadcast, the first reached first: seconds to each stage, bytes from receipts."""
    size, sender = uploads.c.size_bytes, uploads.c.sender
    is_peer = sender.in_(sa.select(nodes.c.node_id))  # a sender that is no node is the seeder
    received = (
        sa.select(
            uploads.c.receiver,
            sa.func.sum(sa.case((is_peer, size), else_=0)).label("from_peers"),
            sa.func.sum(sa.case((is_peer, 0), else_=size)).label("from_seeder"),
        )
        .where(uploads.c.version == version)
        .group_by(uploads.c.receiver)
        .subquery()
    )
    sent = (
        sa.select(sender, sa.func.sum(size).label("size_bytes"))
        .where(uploads.c.version == version)
        .group_by(sender)
        .subquery()
    )
    unknown = receipts.c.receiver.is_(None)
    rows = connection.execute(
        sa.select(
            nodes.c.node_id,
            nodes.c.name,
            *(_since_publication(column).label(f"{stage}_s") for stage, column in STAGES.items()),
            *(
                sa.case((unknown, None), else_=sa.func.coalesce(received.c[kind], 0)).label(kind)
                for kind in ("from_peers", "from_seeder")
            ),
            receipts.c.from_origins,
            sa.func.coalesce(sent.c.size_bytes, 0).label("passed_on_bytes"),
        )
        .join_from(broadcasts, versions, versions.c.version == broadcasts.c.version)
        .join(nodes, nodes.c.node_id == broadcasts.c.node_id)
        .outerjoin(
            receipts, (receipts.c.version == broadcasts.c.version) & (receipts.c.receiver == broadcasts.c.node_id)
        )
        .outerjoin(received, received.c.receiver == broadcasts.c.node_id)
        .outerjoin(sent, sent.c.sender == broadcasts.c.node_id)
        .where(broadcasts.c.version == version)
        .order_by(ENDED_MS.is_(None), ENDED_MS, nodes.c.node_id)
    ).mappings()
    return [dict(row) for row in rows]


def _since_publication(moment_ms: sa.ColumnElement[int]) -> sa.ColumnElement[Any]:
    """Return the seconds from a version's publication to a moment."""
    return (moment_ms - versions.c.published_ms) / 1000.0
