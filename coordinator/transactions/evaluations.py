"""Evaluations: the measurement of one version on held-out problems by the nodes, as effects.

    running ─ every problem answered ─▶ done
            └ no node holds its version any more, or its time is over ─▶ partial, or void if nothing is measured

- An evaluation is pinned to a version when it begins, and has groups of its own, below zero:
  `coordinator.transactions.evaluation_leases` leases them. They are paid and audited, never trained on, and do not
  count in the staleness bound.
- Its problems are the same in every evaluation of a round, so versions are compared on equal terms.
- A fault that an audit finds removes its group from the result; if the evaluation still runs, it is measured again.
- A result is stored with the version, the update and the cost until then; it is reported with its interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import sqlalchemy as sa

from coordinator.config import Config, EvalSection
from coordinator.rules import scores
from coordinator.rules.lifecycle import UNANSWERED, GroupState, RolloutState
from coordinator.store.tables import (
    IS_OPEN,
    batches,
    evaluations,
    groups,
    is_alive,
    leases,
    nodes,
    parts,
    rollouts,
    versions,
)
from coordinator.transactions import leases as lease_table
from coordinator.transactions import policy_versions, standings
from protocol import limits
from protocol.errors import NotFound, OutOfOrder
from protocol.work.learning import Evaluated

Why = Literal["before", "every", "last", "asked"]
"""Reason of an evaluation: before training, every n versions, the last version, or the operator's request."""

FIRST: tuple[Why, ...] = ("before", "last")
"""Reasons of evaluations that go first: nothing is trained on while they run, or nothing more."""


def start_due_evaluations(
    connection: sa.Connection, version: int, sizes: Mapping[str, int], config: Config, now_ms: int
) -> int:
    """Start the evaluations that are due with this version, and return their number; `sizes` has problems per split."""
    update, settings = _update_of(connection, version), config.eval
    why: Why
    if not settings.every:
        return 0
    if update >= config.round.max_updates:
        why = "last"
    elif version == 1 and settings.before_train:
        why = "before"
    elif version > 1 and (version - 1) % settings.every == 0:
        why = "every"
    else:
        return 0
    known = sa.select(evaluations.c.split).where(evaluations.c.version == version, evaluations.c.why != "asked")
    begun = set(connection.execute(known).scalars())
    wanted = [split for split in settings.splits if split not in begun and sizes.get(split)]
    for split in wanted:
        start_evaluation(
            connection, version, split, sizes[split], settings, seed=config.round.seed, why=why, now_ms=now_ms
        )
    return len(wanted)


def start_evaluation(
    connection: sa.Connection,
    version: int,
    split: str,
    size: int,
    settings: EvalSection,
    *,
    seed: int,
    why: Why = "asked",
    now_ms: int,
) -> int:
    """Start one evaluation on a split of `size` problems, and return its number."""
    update = _update_of(connection, version)
    number = 1 + (connection.execute(sa.select(sa.func.max(evaluations.c.number))).scalar() or 0)
    chosen = choose(size, settings.problems, split=split, seed=seed)
    connection.execute(
        sa.insert(evaluations).values(
            number=number,
            version=version,
            policy_update=update,
            split=split,
            samples=settings.samples,
            problems=len(chosen),
            solved=settings.solved,
            why=why,
            state="running",
            begun_ms=now_ms,
            axes=axes(connection, update),
        )
    )
    lowest = connection.execute(sa.select(sa.func.min(groups.c.group_no))).scalar() or 0
    first = min(0, lowest) - 1
    rows = [
        {
            "group_no": first - place,
            "state": GroupState.OPEN.value,
            "split": split,
            "prompt": problem,
            "evaluation": number,
        }
        for place, problem in enumerate(chosen)
    ]
    connection.execute(sa.insert(groups), rows)
    return number


def choose(size: int, wanted: int, *, split: str, seed: int) -> list[int]:
    """Return the problems of a split of `size` that are measured: always the same, in ascending order. Pure."""

    def place(index: int) -> bytes:
        return blake2b(f"evaluation/{seed}/{split}/{index}".encode(), digest_size=8).digest()

    return sorted(sorted(range(size), key=place)[:wanted])


def axes(connection: sa.Connection, update: int) -> dict[str, float]:
    """Return the samples, tokens, seconds and cost up to an update: the axes of a curve beside the version."""
    trained = rollouts.c.batch <= update
    tokens, rewards_bytes, credit = connection.execute(
        sa.select(
            sa.func.sum(rollouts.c.tokens), sa.func.sum(sa.func.length(rollouts.c.rewards)),
            sa.func.sum(rollouts.c.credit_micros),
        ).where(trained)
    ).one()  # fmt: skip
    of_parts = sa.select(sa.func.sum(parts.c.credit_micros), sa.func.sum(parts.c.tokens)).where(
        parts.c.whole.in_(sa.select(rollouts.c.claim_id).where(trained))
    )
    more_credit, more_tokens = connection.execute(of_parts).one()
    seconds = sa.select(sa.func.sum(batches.c.idle_s + batches.c.busy_s)).where(batches.c.batch <= update)
    return {
        "samples": float(int(rewards_bytes or 0) // 4),
        "tokens": float(int(tokens or 0) + int(more_tokens or 0)),
        "seconds": float(connection.execute(seconds).scalar() or 0.0),
        "cost": (int(credit or 0) + int(more_credit or 0)) / 1e6,
    }


def record_group(connection: sa.Connection, group_no: int, now_ms: int) -> None:
    """Update an evaluation after one of its groups was answered, or its answer retracted."""
    number = connection.execute(sa.select(groups.c.evaluation).where(groups.c.group_no == group_no)).scalar_one()
    if number is None:
        return  # the group of a query
    state = connection.execute(sa.select(evaluations.c.state).where(evaluations.c.number == number)).scalar_one()
    left = sa.select(groups.c.group_no).where(groups.c.evaluation == number, groups.c.state.in_(UNANSWERED))
    unscored = sa.select(rollouts.c.claim_id).join(groups, groups.c.group_no == rollouts.c.group_no)
    unscored = unscored.where(groups.c.evaluation == number, rollouts.c.state == RolloutState.UNSCORED.value)
    if state != "running":
        _put(connection, number, {"result": _result(connection, number)})
    elif not any(connection.execute(query.limit(1)).first() for query in (left, unscored)):
        _put(connection, number, {"state": "done", "ended_ms": now_ms, "result": _result(connection, number)})


def sweep(connection: sa.Connection, settings: EvalSection, *, alive_since_ms: int, now_ms: int) -> list[int]:
    """End evaluations that cannot be finished: no live node holds the version, or the time is over."""
    newest, _ = policy_versions.newest_version(connection)
    ended = []
    for row in connection.execute(_running()).all():
        held = sa.select(nodes.c.node_id).where(nodes.c.version == row.version, is_alive(alive_since_ms))
        at_work = sa.select(leases.c.lease_id).join(groups, groups.c.group_no == leases.c.group_no)
        at_work = at_work.where(groups.c.evaluation == row.number, IS_OPEN)
        gone = row.version < newest and not any(connection.execute(query.limit(1)).first() for query in (held, at_work))
        if gone or now_ms - row.begun_ms >= 1000 * settings.patience_s:
            stop(connection, row.number, now_ms)
            ended.append(row.number)
    return ended


def stop_all(connection: sa.Connection, now_ms: int) -> None:
    """Stop all evaluations at the end of the round, when no node gets leases any more."""
    for row in connection.execute(_running()).all():
        stop(connection, row.number, now_ms)


def stop(connection: sa.Connection, number: int, now_ms: int) -> None:
    """End an evaluation with the results that it has."""
    result = _result(connection, number)
    _put(connection, number, {"state": "partial" if result else "void", "ended_ms": now_ms, "result": result})


def is_running(connection: sa.Connection, why: Why | None = None) -> bool:
    """Return True if an evaluation runs; with `why`, one with that reason."""
    query = _running() if why is None else _running().where(evaluations.c.why == why)
    return connection.execute(query.limit(1)).first() is not None


def oldest_needed(connection: sa.Connection) -> int | None:
    """Return the oldest version whose files are needed: it is evaluated or audited, or may yet be."""
    evaluated = sa.select(sa.func.min(evaluations.c.version)).where(evaluations.c.state == "running")
    oldest = (
        standings.oldest_waiting(connection),
        lease_table.oldest_in_vain(connection),
        connection.execute(evaluated).scalar(),
    )
    return min((version for version in oldest if version is not None), default=None)


def best(connection: sa.Connection) -> int | None:
    """Return the version with the highest average on the split of the first evaluation; the earlier of equal ones."""
    first = sa.select(evaluations.c.split).order_by(evaluations.c.number).limit(1).scalar_subquery()
    done = sa.select(evaluations).where(evaluations.c.state == "done", evaluations.c.split == first)
    rows = [row for row in connection.execute(done.order_by(evaluations.c.number)) if row.result]
    return max(rows, key=lambda row: (row.result["average"], -row.version)).version if rows else None


def list_evaluations(connection: sa.Connection, *, version: int = 0) -> list[dict[str, Any]]:
    """Return every evaluation, or those of a version, the oldest first, with progress and result."""
    query = sa.select(evaluations).order_by(evaluations.c.number)
    if version:
        query = query.where(evaluations.c.version == version)
    answered = sa.select(groups.c.evaluation, sa.func.count()).where(groups.c.state == GroupState.ACCEPTED.value)
    answered = answered.where(groups.c.evaluation.is_not(None)).group_by(groups.c.evaluation)
    counts: dict[int, int] = {number: int(count) for number, count in connection.execute(answered)}
    return [_shown(dict(row), counts.get(row["number"], 0)) for row in connection.execute(query).mappings()]


def latest_results(connection: sa.Connection) -> tuple[Evaluated, ...]:
    """Return the last evaluations with a result, in the form that the learner passes on to its metric boards."""
    ended = sa.select(evaluations).where(evaluations.c.state.in_(("done", "partial")))
    last = connection.execute(ended.order_by(evaluations.c.number.desc()).limit(limits.EVALUATIONS_TOLD_MAX)).all()
    return tuple(
        Evaluated(number=row.number, update=row.policy_update, figures=_figures(row.split, row.result))
        for row in reversed(last)
        if row.result
    )


def _figures(split: str, result: Mapping[str, Any]) -> dict[str, float]:
    passed = {f"eval/{split}/pass@{j}": float(share) for j, share in result["passed"].items()}
    return {f"eval/{split}/avg@{result['samples']}": float(result["average"]), **passed}


def _shown(row: Mapping[str, Any], answered: int) -> dict[str, Any]:
    return {
        "number": row["number"],
        "version": row["version"],
        "update": row["policy_update"],
        **row["axes"],
        "split": row["split"],
        "why": row["why"],
        "state": row["state"],
        "problems": row["problems"],
        "answered": answered,
        "samples_each": row["samples"],
        "begun_ms": row["begun_ms"],
        "ended_ms": row["ended_ms"],
        "result": row["result"],
    }


def details(connection: sa.Connection, number: int) -> list[dict[str, Any]]:
    """Return each answered problem of an evaluation: its place in the split, and the scores of its samples."""
    return [{"problem": problem, "scores": measured} for problem, measured in _measured(connection, number)]


def _result(connection: sa.Connection, number: int) -> dict[str, Any] | None:
    solved = connection.execute(sa.select(evaluations.c.solved).where(evaluations.c.number == number)).scalar_one()
    result = scores.result([samples for _, samples in _measured(connection, number)], solved=solved)
    if result is None:
        return None
    return asdict(result) | {"passed": {str(j): share for j, share in result.passed.items()}}


def _measured(connection: sa.Connection, number: int) -> list[tuple[int, Sequence[float]]]:
    query = (
        sa.select(groups.c.prompt, rollouts.c.rewards)
        .join_from(groups, rollouts, rollouts.c.group_no == groups.c.group_no)
        .where(groups.c.evaluation == number, rollouts.c.state == RolloutState.MEASURED.value)
        .order_by(groups.c.prompt)
    )
    return [(problem, np.frombuffer(data, "<f4").tolist()) for problem, data in connection.execute(query)]


def _running() -> sa.Select[Any]:
    return sa.select(evaluations).where(evaluations.c.state == "running").order_by(evaluations.c.number)


def _put(connection: sa.Connection, number: int, values: dict[str, Any]) -> None:
    connection.execute(sa.update(evaluations).where(evaluations.c.number == number).values(**values))


def _update_of(connection: sa.Connection, version: int) -> int:
    newest, _ = policy_versions.newest_version(connection)
    update = connection.execute(sa.select(versions.c.policy_update).where(versions.c.version == version)).scalar()
    if update is None:
        raise NotFound(f"Version {version} was not published.", hint="`swarm-coordinator status` names the newest.")
    if version != newest:
        raise OutOfOrder(
            f"Nodes hold version {newest} and no longer version {version}.",
            hint="Evaluate the newest one, or export this one and evaluate it elsewhere.",
        )
    return int(update)
