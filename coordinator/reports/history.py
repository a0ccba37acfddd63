"""The records behind the figures: a node's days, claims and refusals, and the round's last incidents.

- All functions are effects that only read, `(connection, …) → outcome`.
- Answers are bounded: the last days and claims of a node, the last incidents of the round.
"""

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from coordinator.rules.lifecycle import RolloutState
from coordinator.store.tables import nodes, rejections, rollouts
from coordinator.transactions import blames, reward_columns
from coordinator.transactions.standings import IS_KNOWN
from ledger.book import ClaimState
from ledger.tables import claims_table, entries_table
from protocol.errors import VerifierFailed
from protocol.ids import NodeId
from protocol.limits import DAY_MS
from protocol.text.plain import counted

DAYS_SHOWN = 60
CLAIMS_SHOWN = 50
INCIDENTS_SHOWN = 20
UNPROVEN_SHOWN = 5
"""Incidents of nodes without validated work: keys are free, and their incidents must not displace all others."""


def days(connection: sa.Connection, node: NodeId) -> list[dict[str, Any]]:
    """Return a node's claims of each day by their outcome, the newest day first."""
    day = (rollouts.c.accepted_ms // DAY_MS).label("day")
    amounts = (
        sa.func.sum(sa.case((claims_table.c.state == state.value, claims_table.c.amount_micros), else_=0)).label(
            state.value
        )
        for state in (ClaimState.POSTED, ClaimState.PENDING, ClaimState.VOIDED)
    )
    rows = connection.execute(
        sa.select(day, sa.func.count().label("groups"), sa.func.sum(rollouts.c.tokens).label("tokens"), *amounts)
        .join_from(rollouts, claims_table, claims_table.c.claim_id == rollouts.c.claim_id)
        .where(rollouts.c.node_id == node)
        .group_by(day)
        .order_by(day.desc())
        .limit(DAYS_SHOWN)
    ).mappings()
    return [{name: int(value) for name, value in row.items()} for row in rows]


def claims(connection: sa.Connection, node: NodeId) -> list[dict[str, Any]]:
    """Return a node's last claims, the newest first, each with the indexes of its ledger entries."""
    rows = connection.execute(
        sa.select(
            rollouts.c.claim_id,
            rollouts.c.accepted_ms,
            rollouts.c.version,
            rollouts.c.tokens,
            rollouts.c.credit_micros,
            claims_table.c.state,
        )
        .join_from(rollouts, claims_table, claims_table.c.claim_id == rollouts.c.claim_id)
        .where(rollouts.c.node_id == node)
        .order_by(rollouts.c.accepted_ms.desc(), rollouts.c.claim_id)
        .limit(CLAIMS_SHOWN)
    ).mappings()
    claims = [dict(row) for row in rows]
    effects = [f"{kind}:{row['claim_id']}" for row in claims for kind in ("pending", "settle")]
    entry = entries_table.c
    about = sa.select(entry.effect, entry.index).where(entry.effect.in_(effects))
    places = {row.effect: row.index for row in connection.execute(about)}
    for row in claims:
        row["entry"] = places.get(f"pending:{row['claim_id']}")
        row["settled_entry"] = places.get(f"settle:{row['claim_id']}")
    return claims


def refusals(connection: sa.Connection, node: NodeId) -> list[dict[str, Any]]:
    """Return the reasons for which a node's answers were refused, each with its count."""
    stmt = sa.select(rejections).where(rejections.c.node_id == node).order_by(rejections.c.count.desc())
    return [dict(row) for row in connection.execute(stmt).mappings()]


@dataclass(frozen=True)
class Incident:
    """A problem with a node, and the number of times it occurred."""

    ms: int
    node_id: str
    name: str
    what: str
    count: int
    detail: str


def incidents(connection: sa.Connection) -> list[Incident]:
    """Return the last incidents, the newest first: rejections by node and code, accused peers, failed rewards."""
    incidents = _rejected(connection, IS_KNOWN, INCIDENTS_SHOWN) + _rejected(connection, ~IS_KNOWN, UNPROVEN_SHOWN)
    for accused in blames.accusations(connection, accused_max=INCIDENTS_SHOWN):
        node = (accused.accused, accused.accused_name)
        incidents.append(Incident(accused.newest_ms, *node, "wrong_chunk", accused.chunks, accused.detail))
    if unproven := blames.unproven(connection):
        incidents.append(_of_unproven(unproven))
    unjudged = connection.execute(
        sa.select(rollouts.c.accepted_ms, rollouts.c.node_id, rollouts.c.marks, nodes.c.name)
        .outerjoin(nodes, nodes.c.node_id == rollouts.c.node_id)
        .where(rollouts.c.state == RolloutState.UNJUDGED.value)
        .order_by(rollouts.c.accepted_ms.desc())
        .limit(INCIDENTS_SHOWN)
    )
    for row in unjudged:
        detail = f"Not the node's fault; it is paid. {row.marks.get(reward_columns.GIVEN_UP, '')}"
        incidents.append(Incident(row.accepted_ms, row.node_id, row.name or "", VerifierFailed.code, 1, detail))
    return sorted(incidents, key=lambda incident: -incident.ms)[:INCIDENTS_SHOWN]


def _rejected(connection: sa.Connection, standing: sa.ColumnElement[bool], shown_max: int) -> list[Incident]:
    """Return the newest rejections of nodes with this standing."""
    rows = connection.execute(
        sa.select(rejections, rejections.c.count.label("times"), nodes.c.name)
        .outerjoin(nodes, nodes.c.node_id == rejections.c.node_id)
        .where(standing)
        .order_by(rejections.c.last_ms.desc())
        .limit(shown_max)
    )
    return [Incident(row.last_ms, row.node_id, row.name or "", row.code, row.times, row.last_message) for row in rows]


def _of_unproven(blamed: blames.Unproven) -> Incident:
    detail = (
        f"{counted(blamed.accusers, 'node')} without validated work blamed {counted(blamed.accused, 'node')}. "
        "Such reports do not count."
    )
    return Incident(blamed.newest_ms, "", "unproven nodes", "wrong_chunk", blamed.rows, detail)
