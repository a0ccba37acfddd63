"""Whether learner, auditor and seeder run, when the learner was last heard of, and since when it waits for a batch.

- Who leads the round notes how its children fare and what the learner asks, as facts: so the status, pages and metrics
  of every process know it. A launch forgets what was noted before.
- Silence is judged by what an update has lately taken: a learner says nothing while it trains.
- A learner that ended is told until it has made an update again.
"""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from coordinator.config import Config
from coordinator.store.state import get_fact, set_fact
from coordinator.store.tables import batches
from coordinator.transactions.leases import latest_batch
from coordinator.transactions.policy_versions import newest_version
from protocol.text.plain import duration_text

CHILDREN = "children"
"""The fact of how each child fares: `coordinator.base.children.Life`, and since when."""

LEARNER = "learner_heard"
"""The fact of when the learner was last heard of, and of the batch that it asked for last."""

SHOWN = ("learner", "auditor", "seeder")

QUIET_MIN_S = 120.0
QUIET_UPDATES = 3
"""A learner may be silent for as long as so many of its longest updates of late."""

START_S = 600.0
"""Until it is first heard of: it loads a model, and may download one."""

UPDATES_LATELY = 32

CRASHED_LATELY_S = 60.0
"""A child that was started again so long ago, and runs, is well."""


def launched(connection: sa.Connection, now_ms: int) -> None:
    """The coordinator has started; nobody was heard of yet."""
    set_fact(connection, CHILDREN, {})
    set_fact(connection, LEARNER, {"launched_ms": now_ms})


def was_launched(connection: sa.Connection) -> bool:
    """Whether the round was ever more than made; what published a version was, by whatever software."""
    return get_fact(connection, LEARNER) is not None or newest_version(connection)[0] > 0


def fares(connection: sa.Connection, name: str, life: Mapping[str, Any], now_ms: int) -> None:
    """A child was started, or has ended."""
    told: dict[str, Any] = get_fact(connection, CHILDREN, {})
    ended_ms = now_ms if life["state"] != "runs" else told.get(name, {}).get("ended_ms")
    set_fact(connection, CHILDREN, told | {name: {**life, "since_ms": now_ms, "ended_ms": ended_ms}})


def heard(connection: sa.Connection, now_ms: int, *, asks_for: int = 0) -> None:
    """The learner said something; it may have asked for a batch, and again for the same one."""
    before: dict[str, Any] = get_fact(connection, LEARNER, {})
    told = before | {"heard_ms": now_ms}
    if asks_for and asks_for != before.get("asks_for"):
        told |= {"asks_for": asks_for, "asked_ms": now_ms}
    set_fact(connection, LEARNER, told)


def figures(connection: sa.Connection, config: Config, now_ms: int) -> dict[str, Any]:
    """What is told of them; of a round that is stopped nothing, and no moment is given then."""
    if not now_ms:
        return {"programs": {}, "learner_silent_s": None, "learner_waits_s": 0.0, "update_age_s": None} | _alarms(
            "", ""
        )
    learner: dict[str, Any] = get_fact(connection, LEARNER, {})
    told: dict[str, dict[str, Any]] = get_fact(connection, CHILDREN, {})
    children = {name: told[name] for name in SHOWN if name in told}
    reported_ms = connection.execute(sa.select(sa.func.max(batches.c.reported_ms))).scalar() or 0
    waits = learner.get("asks_for", 0) > latest_batch(connection)
    since_ms = learner.get("heard_ms") or learner.get("launched_ms")
    silent_s = max(0, now_ms - since_ms) / 1000 if since_ms else None
    logs = config.round.directory / "logs"
    alarm = ""
    if not get_fact(connection, "finished", False):
        may_s = _may_be_silent_s(connection) if "heard_ms" in learner else START_S
        alarm = _learner_alarm(children.get("learner"), silent_s, may_s, reported_ms, f"{logs / 'learner.log'}", now_ms)
    others = (_other_alarm(name, one, f"{logs / name}.log", now_ms) for name, one in children.items())
    return {
        "programs": children,
        "learner_silent_s": silent_s,
        "learner_waits_s": max(0, now_ms - learner["asked_ms"]) / 1000 if waits else 0.0,
        "update_age_s": max(0, now_ms - reported_ms) / 1000 if reported_ms else None,
    } | _alarms(alarm, next(filter(None, others), ""))


def _alarms(learner: str, others: str) -> dict[str, str]:
    return {"learner_alarm": learner, "programs_alarm": learner or others}


def _may_be_silent_s(connection: sa.Connection) -> float:
    lately = sa.select(batches.c.busy_s).where(batches.c.busy_s > 0).order_by(batches.c.batch.desc())
    longest = max(connection.execute(lately.limit(UPDATES_LATELY)).scalars(), default=START_S / QUIET_UPDATES)
    return max(QUIET_MIN_S, QUIET_UPDATES * longest)


def _learner_alarm(
    child: Mapping[str, Any] | None, silent_s: float | None, may_s: float, reported_ms: int, log: str, now_ms: int
) -> str:
    if child and child["state"] == "ended":
        return _ended("learner", child, log, now_ms)
    if child and child["ended_ms"] and child["ended_ms"] > reported_ms:
        times = "" if child["restarts"] < 2 else f", {child['restarts']} times since the launch"
        ago = duration_text((now_ms - child["ended_ms"]) / 1000)
        return (
            f"The learner ended with code {child['code']} {ago} ago{times}, and has made no update since; it is "
            f"started again. {log} says why it ended."
        )
    if silent_s is not None and silent_s > may_s:
        return f"The learner has not reported for {duration_text(silent_s)}. Read {log}, or the log of its machine."
    return ""


def _other_alarm(name: str, child: Mapping[str, Any], log: str, now_ms: int) -> str:
    if name == "learner":
        return ""
    if child["state"] == "ended" and child["code"]:
        return _ended(name, child, log, now_ms)
    ended_ms = child["ended_ms"]
    if child["state"] == "crashed" or (child["restarts"] > 1 and now_ms - ended_ms < 1000 * CRASHED_LATELY_S):
        return (
            f"The {name} ended with code {child['code']}, {child['restarts']} times since the launch. {log} says why."
        )
    return ""


def _ended(name: str, child: Mapping[str, Any], log: str, now_ms: int) -> str:
    ago = duration_text((now_ms - child["since_ms"]) / 1000)
    return (
        f"The {name} ended with code {child['code']} {ago} ago and is not started again. {log} says why; mend that, "
        "and launch the round again."
    )
