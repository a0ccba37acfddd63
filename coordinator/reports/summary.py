"""The round's public figures: status, leaderboard and last broadcast, each read in one transaction."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from heapq import nlargest
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from coordinator.config import Config
from coordinator.learner.settings import algorithm
from coordinator.reports import alarms, earning_rates, health, history, learned, learner_waiting, programs, standby
from coordinator.store.facts import FINISHED, PROGRESS, ROUND_ID, get_fact
from coordinator.store.tables import batches, is_alive, leases, nodes, rejections, rollouts, transfers
from coordinator.tasks.kinds import task_label
from coordinator.transactions import (
    audit_pace,
    audits,
    blames,
    broadcasts,
    curriculum,
    evaluations,
    fleet,
    gifts,
    policy_versions,
    staleness_bound,
    standings,
)
from coordinator.transactions.batches import HELD
from coordinator.transactions.leases import latest_batch, rules_of
from ledger import store
from ledger.accounts import BUDGET
from ledger.book import ClaimState
from ledger.tables import claims_table
from protocol.wire import generation
from protocol.work.lease import OPEN, LeaseState

UNFINISHED_SHOWN = 10
"""The most nodes that the status lists for their unanswered leases; the leaderboard lists all."""


AFTER_ALL_MS = 2**53
"""A time after all requests of nodes: no node counts as alive."""


def status(connection: sa.Connection, *, config: Config, alive_since_ms: int, now_ms: int = 0) -> dict[str, Any]:
    """Return the status of the round; nodes with a request since `alive_since_ms` are alive.

    `now_ms` is 0 for a stopped round.
    """
    version, version_update = policy_versions.newest_version(connection)
    idle_s, busy_s = _learner_s(connection)
    progress = get_fact(connection, PROGRESS)
    asked = fleet.load(connection, config, alive_since_ms=alive_since_ms)
    kappa = fleet.kappa(asked, config)
    running = programs.figures(connection, config, now_ms)
    update, update_interval_s = _reported_update(connection), learned.update_interval_s(connection)
    finished = get_fact(connection, FINISHED)
    updates_left = 0 if finished or config.learner.external else config.round.max_updates - update
    alarm, waits_s = running["programs_alarm"], running["learner_waits_s"]
    return {
        "phase": progress.get("phase", "starting"),
        "fraction": progress.get("fraction", 0.0),
        "detail": progress.get("detail", ""),
        "accuracy_before": progress.get("accuracy_before"),
        "accuracy_after": progress.get("accuracy_after"),
        "finished": finished,
        "external": config.learner.external,
        "version": version,
        "version_update": version_update,
        "update": update,
        "update_interval_s": update_interval_s,
        "left_s": updates_left * update_interval_s if updates_left > 0 and update_interval_s else None,
        "batch": latest_batch(connection),
        "max_staleness": connection.execute(sa.select(sa.func.max(batches.c.max_staleness))).scalar() or 0,
        "learner_idle_s": idle_s,
        "learner_busy_s": busy_s,
        "learner_idle_share": _share(idle_s + waits_s, busy_s),
        "rollouts": _rollouts(connection),
        "rejected": _rejected(connection),
        "leases": _counts(connection, leases.c.state),
        "unfinished_by": _unfinished_by(connection),
        "audit": standings.audited(connection),
        "budget_micros": store.balance(connection, BUDGET),
        "payouts": earning_rates.round_payouts(connection, config)._asdict(),
        "gifts": gifts.summary(connection),
        "nodes": connection.execute(sa.select(sa.func.count()).select_from(nodes)).scalar_one(),
        **_alive(connection, version, alive_since_ms),
        **_paused(connection, alive_since_ms),
        "evaluations": _last_evaluations(connection),
        "broadcast": broadcasts.summary(connection, alive_since_ms=alive_since_ms),
        "selection": curriculum.curriculum_report(connection, rules_of(config)),
        "fleet": fleet.list_nodes(connection),
        "publish_every": kappa,
        "exact_classes": sorted(audits.exact_classes(connection, now_ms)),
        "staleness_bound": staleness_bound.in_force(connection, config.staleness),
        "load": asdict(asked) if asked else None,
        "standby": _standby(config, now_ms),
        **running,
        **health.figures(
            connection,
            asked,
            kappa,
            staleness_max=config.staleness.max_updates,
            programs_alarm=alarm,
            waits_s=waits_s,
            compares_groups=algorithm(config).compares_groups,
            external=config.learner.external,
        ),
    }


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part + rest else 0.0


def public_settings(config: Config, round_id: str) -> dict[str, Any]:
    """Return the settings that nodes and visitors need."""
    return {
        "round_id": round_id,
        "task": task_label(config),
        "staleness": config.staleness.max_updates,
        "max_updates": config.round.max_updates,
        "samples_per_group": config.sampling.samples_per_group,
        "max_price_micros_per_mtok": config.market.max_price_micros_per_mtok,
        "generation": generation.CURRENT,
        "exact_bonus": config.market.exact_bonus,
        "unit": config.round.money.to_json(),
        "classes": list(config.audit.classes),
    }


def stopped(connection: sa.Connection, *, config: Config, since_ms: int) -> dict[str, Any]:
    """Return the operator's figures and the public settings of a stopped round: no node counts as alive."""
    figures = for_operator(connection, config=config, alive_since_ms=AFTER_ALL_MS)
    return figures | public_settings(config, get_fact(connection, ROUND_ID)) | {"stopped_since_ms": since_ms}


def explained(connection: sa.Connection, *, config: Config, alive_since_ms: int, now_ms: int = 0) -> dict[str, Any]:
    """Return the status with the learner's state and its cause, the credit, and the last incidents."""
    figures = status(connection, config=config, alive_since_ms=alive_since_ms, now_ms=now_ms)
    is_held = 0 < now_ms < get_fact(connection, HELD)
    told = learner_waiting.explain_waiting(figures, config, backlog=standings.backlog(connection), is_held=is_held)
    return figures | {
        "learner": asdict(told),
        "credit": _credited(connection),
        "incidents": [asdict(incident) for incident in history.incidents(connection)],
    }


def for_operator(connection: sa.Connection, *, config: Config, alive_since_ms: int, now_ms: int = 0) -> dict[str, Any]:
    """Return `explained` with the number of claims that wait for an auditor, which would reveal the draw to nodes."""
    figures = explained(connection, config=config, alive_since_ms=alive_since_ms, now_ms=now_ms)
    copy = standby.read(config.round.directory)
    if figures["standby"] and copy:
        figures["standby"] |= {"target": copy.target, "problem": copy.problem}
    figures |= {"backlog": standings.backlog(connection), "backlog_max": config.audit.backlog_max}
    if not now_ms or figures["finished"]:
        return figures
    auditing = audit_pace.figures(connection, config.audit.backlog_max, now_ms)
    upkeep = alarms.upkeep(config, now_ms)
    found = figures["alarms"] + alarms.raised(
        [
            ("auditors_behind", auditing["alarm"]),
            ("learner_waits", _waiting_alarm(figures)),
            ("standby_behind", _standby_alarm(figures["standby"])),
            *alarms.upkeep_alarms(upkeep, config),
        ]
    )
    return figures | {
        "audit_pace": auditing,
        "upkeep": upkeep,
        "alarms": found,
        "alarm": found[0]["text"] if found else "",
    }


def _waiting_alarm(figures: Mapping[str, Any]) -> str:
    """Return why no group comes, such as an empty fleet or a used-up budget; "" if another alarm says so, too."""
    learner, texts = figures["learner"], [alarm["text"] for alarm in figures["alarms"]]
    waits = learner["state"] in ("waits", "will wait") and learner["why"] not in texts
    return learner["why"] if waits and not any(each["code"] == "learner_waits" for each in figures["alarms"]) else ""


def _standby_alarm(copy: Mapping[str, Any] | None) -> str:
    """Return the alarm for a standby copy that cannot take over without a gap; "" if there is none, or it keeps up."""
    if not copy or copy["keeps_up"]:
        return ""
    why = f": {copy['problem']}" if copy.get("problem") else ""
    return (
        f"The standby copy is {copy['behind_s']:.0f} s behind, and is not waited for{why}. If this machine is lost "
        "now, the round continues with a gap. See the log of `backup --follow`."
    )


def _standby(config: Config, now_ms: int) -> dict[str, Any] | None:
    """Return the lag of the standby copy; None if the round has no copy, or is stopped."""
    copy = standby.read(config.round.directory) if now_ms else None
    return {"behind_s": copy.age_s(now_ms), "keeps_up": copy.is_current(now_ms)} if copy else None


def _credited(connection: sa.Connection) -> dict[str, int]:
    """Return the micro-units and the tokens of all nodes' claims, by the state of the claim."""
    claim = claims_table.c
    sums = sa.select(claim.state, sa.func.sum(claim.amount_micros), sa.func.sum(claim.tokens)).group_by(claim.state)
    rows = {state: (int(micros), int(tokens)) for state, micros, tokens in connection.execute(sums)}
    states = (ClaimState.POSTED, ClaimState.PENDING, ClaimState.VOIDED)
    found = {state.value: rows.get(state, (0, 0)) for state in states}
    micros = {f"{state}_micros": amounts[0] for state, amounts in found.items()}
    return micros | {f"{state}_tokens": amounts[1] for state, amounts in found.items()}


def _last_evaluations(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return the last finished and the running evaluation of each split."""
    last: dict[tuple[str, bool], dict[str, Any]] = {}
    for row in evaluations.list_evaluations(connection):
        last[row["split"], row["state"] == "running"] = row
    return sorted(last.values(), key=lambda row: row["number"])


def broadcast(connection: sa.Connection, *, alive_since_ms: int) -> dict[str, Any]:
    """Return the spread of the last version, in total and by node."""
    shown = broadcasts.summary(connection, alive_since_ms=alive_since_ms)
    return {"broadcast": shown, "nodes": broadcasts.by_node(connection, shown["version"]) if shown else []}


def leaderboard(connection: sa.Connection, others_max: int | None = None) -> list[dict[str, Any]]:
    """Return a row per node, the best earner first, with at most `others_max` nodes that have no claim.

    These are the nodes that uploaded the most, and among equal ones those that were last seen most recently.
    """
    earned = {total.node_id: total for total in store.node_totals(connection)}
    moved = {
        row.node_id: row
        for row in connection.execute(
            sa.select(
                transfers.c.node_id,
                *(sa.func.sum(transfers.c[name]).label(name) for name in MOVED),
            ).group_by(transfers.c.node_id)
        )
    }
    accused = blames.counts(connection)
    refused = _by_name(
        connection, sa.select(rejections.c.node_id, sa.func.sum(rejections.c.count)).group_by(rejections.c.node_id)
    )
    ends = _lease_ends(connection)
    accepted = _by_name(connection, sa.select(rollouts.c.node_id, sa.func.count()).group_by(rollouts.c.node_id))
    every = connection.execute(sa.select(*_OF_NODE)).mappings().all()
    if others_max is not None:
        others = (row for row in every if row["node_id"] not in earned)
        order = itemgetter("uploaded_bytes", "last_seen_ms", "node_id")
        every = [row for row in every if row["node_id"] in earned] + nlargest(others_max, others, key=order)
    rows = []
    for row in every:
        node_id = row["node_id"]
        total = earned.get(node_id)
        traffic = moved.get(node_id)
        rows.append(
            {
                "node_id": node_id,
                "name": row["name"],
                "posted_micros": total.posted_micros if total else 0,
                "pending_micros": total.pending_micros if total else 0,
                "voided_micros": total.voided_micros if total else 0,
                "validated_tokens": total.posted_tokens if total else 0,
                "accepted_rollouts": accepted.get(node_id, 0),
                "rejected_rollouts": refused.get(node_id, 0),
                **_shares(ends.get(node_id, {})),
                "blamed": accused.get(node_id, 0),
                "price_micros_per_mtok": row["price_micros_per_mtok"],
                "tokens_per_s": row["tokens_per_s"],
                "phase": row["phase"],
                "version": row["version"],
                "last_seen_ms": row["last_seen_ms"],
                "uploaded_bytes": row["uploaded_bytes"],
                **{name: int(getattr(traffic, name)) if traffic else 0 for name in MOVED},
            }
        )
    return sorted(rows, key=lambda row: (-row["posted_micros"] - row["pending_micros"], row["node_id"]))


_OF_NODE = (
    *(nodes.c.node_id, nodes.c.name, nodes.c.price_micros_per_mtok, nodes.c.tokens_per_s, nodes.c.phase),
    *(nodes.c.version, nodes.c.last_seen_ms, nodes.c.uploaded_bytes),
)
"""The columns of a node without its addresses, which take longer to read than all others."""

MOVED = ("from_peers", "from_seeder", "from_http", "to_peers")
"""Counters of chunk bytes, as in `protocol.work.messages.Transfer`: the node reports them, unlike `uploaded_bytes`."""


BLAMELESS = (LeaseState.ACCEPTED, LeaseState.REJECTED, LeaseState.CANCELLED)
"""Final states of leases that their nodes answered, or that the coordinator cancelled."""


def _lease_ends(connection: sa.Connection) -> dict[str, dict[str, int]]:
    """Return the number of ended leases by node and final state."""
    ended = sa.select(leases.c.node_id, leases.c.state, sa.func.count()).where(leases.c.state.not_in(OPEN))
    ends: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for node_id, state, count in connection.execute(ended.group_by(leases.c.node_id, leases.c.state)):
        ends[node_id][state] = count
    return ends


def _shares(ends: Mapping[str, int]) -> dict[str, Any]:
    """Return a node's leases by state, and the shares of them that it skipped or let expire."""
    total = sum(count for state, count in ends.items() if state != LeaseState.CANCELLED)
    shares = {
        f"{state}_share": ends.get(state, 0) / max(1, total) for state in (LeaseState.SKIPPED, LeaseState.EXPIRED)
    }
    return {"leases": dict(ends), **shares}


def _unfinished_by(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return the nodes that left leases unanswered, the largest share first."""
    names = {row.node_id: row.name for row in connection.execute(sa.select(nodes.c.node_id, nodes.c.name))}
    rows = [
        {"node_id": node_id, "name": names.get(node_id, ""), **_shares(ends)}
        for node_id, ends in _lease_ends(connection).items()
        if any(state not in BLAMELESS for state in ends)
    ]
    rows.sort(key=lambda row: (-row["skipped_share"] - row["expired_share"], row["node_id"]))
    return rows[:UNFINISHED_SHOWN]


def _rollouts(connection: sa.Connection) -> dict[str, int]:
    """Return the number of accepted groups and of their samples, and the groups by state."""
    groups, rewards_bytes = connection.execute(
        sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(sa.func.length(rollouts.c.rewards)), 0))
    ).one()
    return {"groups": groups, "samples": int(rewards_bytes) // 4, **_counts(connection, rollouts.c.state)}


def _rejected(connection: sa.Connection) -> dict[str, int]:
    by_code = sa.select(rejections.c.code, sa.func.sum(rejections.c.count)).group_by(rejections.c.code)
    return _by_name(connection, by_code)


def _counts(connection: sa.Connection, column: sa.Column[str]) -> dict[str, int]:
    return _by_name(connection, sa.select(column, sa.func.count()).group_by(column))


def _by_name(connection: sa.Connection, rows: sa.Select[Any, Any]) -> dict[str, int]:
    """Return the rows, of a name and a count each, as a dictionary."""
    return {name: int(count) for name, count in connection.execute(rows)}


def _alive(connection: sa.Connection, version: int, alive_since_ms: int) -> dict[str, int]:
    """Return the number of nodes that are alive, and of those that have the newest version."""
    up_to_date = sa.func.coalesce(sa.func.sum(sa.case((nodes.c.version >= version, 1), else_=0)), 0)
    alive, holding = connection.execute(sa.select(sa.func.count(), up_to_date).where(is_alive(alive_since_ms))).one()
    return {"nodes_alive": alive, "nodes_up_to_date": holding if version else 0}


def _paused(connection: sa.Connection, alive_since_ms: int) -> dict[str, int]:
    """Return the number of nodes that the operator has paused, and of those that are alive."""
    is_here = sa.func.coalesce(sa.func.sum(sa.case((is_alive(alive_since_ms), 1), else_=0)), 0)
    paused = sa.select(sa.func.count(), is_here).where(nodes.c.paused_ms.is_not(None))
    count, alive = connection.execute(paused).one()
    return {"nodes_paused": count, "nodes_paused_alive": int(alive)}


def _learner_s(connection: sa.Connection) -> tuple[float, float]:
    """Return the seconds that the learner has waited and worked."""
    sums = (sa.func.coalesce(sa.func.sum(column), 0.0) for column in (batches.c.idle_s, batches.c.busy_s))
    idle_s, busy_s = connection.execute(sa.select(*sums)).one()
    return idle_s, busy_s


def _reported_update(connection: sa.Connection) -> int:
    """Return the last update that the learner reported."""
    done = sa.select(sa.func.max(batches.c.batch)).where(batches.c.reported_ms.is_not(None))
    return connection.execute(done).scalar() or 0
