"""The state of learner, auditor and seeder, the time of the learner's last request, and its current wait for a batch.

- The process that leads the round records the state of its children and the learner's requests as facts, so that the
  status, pages and metrics of every process have them. A launch deletes the earlier ones.
- The time without a request that is normal depends on the last updates: a learner sends nothing while it trains.
- The alarm for a learner that ended stays until the learner has made an update again, or with `learner.external` has
  published a version; also after the round was stopped: that of a stopped round has the last line of its log, which no
  page shows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from coordinator.base.children import end_text, last_line
from coordinator.config import Config
from coordinator.store.facts import FINISHED, Fact, get_fact, set_fact
from coordinator.store.tables import batches, versions
from coordinator.transactions.leases import latest_batch
from coordinator.transactions.policy_versions import newest_version
from protocol.text.plain import duration_text

CHILDREN = Fact[Mapping[str, Mapping[str, Any]]]("children", {})
"""The fact with the state of each child: `coordinator.base.children.Life`, and its start."""

LEARNER = Fact[Mapping[str, Any]]("learner_heard", {})
"""The fact with the time of the learner's last request, and the batch that it requested last."""

SHOWN = ("learner", "auditor", "seeder")

QUIET_MIN_S = 120.0
QUIET_UPDATES = 3
"""A learner may send nothing for this many times its longest recent update."""

START_S = 600.0
"""The time allowed until its first request: it loads a model, and may download one."""

UPDATES_LATELY = 32

CRASHED_LATELY_S = 60.0
"""A child that runs, and was restarted longer ago than this, raises no alarm."""


def launched(connection: sa.Connection, now_ms: int) -> None:
    """Record that the coordinator has started, and delete all earlier facts about its children and the learner."""
    set_fact(connection, CHILDREN, {})
    set_fact(connection, LEARNER, {"launched_ms": now_ms})


def was_launched(connection: sa.Connection) -> bool:
    """Return True if the round was ever launched, or if a version was published, by any release."""
    return bool(get_fact(connection, LEARNER)) or newest_version(connection).version > 0


def record_child(connection: sa.Connection, name: str, life: Mapping[str, Any], now_ms: int) -> None:
    """Record that a child was started or has ended."""
    children = get_fact(connection, CHILDREN)
    ended_ms = now_ms if life["state"] != "runs" else children.get(name, {}).get("ended_ms")
    set_fact(connection, CHILDREN, {**children, name: {**life, "since_ms": now_ms, "ended_ms": ended_ms}})


def record_learner_request(connection: sa.Connection, now_ms: int, *, asks_for: int = 0) -> None:
    """Record a request of the learner; `asks_for` is the batch that it requested, perhaps repeatedly."""
    before = get_fact(connection, LEARNER)
    learner = {**before, "heard_ms": now_ms}
    if asks_for and asks_for != before.get("asks_for"):
        learner |= {"asks_for": asks_for, "asked_ms": now_ms}
    set_fact(connection, LEARNER, learner)


def figures(connection: sa.Connection, config: Config, now_ms: int) -> dict[str, Any]:
    """Return the figures and alarms of the children; for a stopped round, `now_ms` is 0, and no child has figures."""
    learner = get_fact(connection, LEARNER)
    lives = get_fact(connection, CHILDREN)
    children = {name: lives[name] for name in SHOWN if name in lives}
    reported_ms = connection.execute(sa.select(sa.func.max(batches.c.reported_ms))).scalar() or 0
    worked_ms = _published_ms(connection) if config.learner.external else reported_ms
    if not now_ms:
        none: dict[str, Any] = {"programs": {}, "learner_silent_s": None, "learner_waits_s": 0.0, "update_age_s": None}
        log_file = config.round.directory / "logs" / "learner.log"
        return none | _alarms(_alarm_of_stopped(children.get("learner"), worked_ms, log_file), "")
    waits = learner.get("asks_for", 0) > latest_batch(connection)
    since_ms = learner.get("heard_ms") or learner.get("launched_ms")
    silent_s = max(0, now_ms - since_ms) / 1000 if since_ms else None
    logs = config.round.directory / "logs"
    alarm = ""
    if not get_fact(connection, FINISHED):
        may_s = _may_be_silent_s(connection) if "heard_ms" in learner else START_S
        alarm = _learner_alarm(children.get("learner"), silent_s, may_s, worked_ms, f"{logs / 'learner.log'}", now_ms)
    others = (_other_alarm(name, child, f"{logs / name}.log", now_ms) for name, child in children.items())
    return {
        "programs": children,
        "learner_silent_s": silent_s,
        "learner_waits_s": max(0, now_ms - learner["asked_ms"]) / 1000 if waits else 0.0,
        "update_age_s": max(0, now_ms - reported_ms) / 1000 if reported_ms else None,
    } | _alarms(alarm, next(filter(None, others), ""))


def _published_ms(connection: sa.Connection) -> int:
    return int(connection.execute(sa.select(sa.func.max(versions.c.published_ms))).scalar() or 0)


def _alarms(learner: str, others: str) -> dict[str, str]:
    return {"learner_alarm": learner, "programs_alarm": learner or others}


def _alarm_of_stopped(child: Mapping[str, Any] | None, worked_ms: int, log_file: Path) -> str:
    """Return how the learner of a stopped round had ended, and why; "" if it worked after that."""
    if not (child and child["code"] and child["ended_ms"] > worked_ms):
        return ""
    said = f"The learner {end_text(child['code'])}, before the round was stopped"
    # One that runs again has written other lines, and one that was killed wrote none about it.
    reason = "" if child["state"] == "runs" or child["code"] < 0 else last_line(log_file)
    return f"{said} (see {log_file}): {reason}" if reason else f"{said}. See {log_file} for the reason."


def _may_be_silent_s(connection: sa.Connection) -> float:
    lately = sa.select(batches.c.busy_s).where(batches.c.busy_s > 0).order_by(batches.c.batch.desc())
    longest = max(connection.execute(lately.limit(UPDATES_LATELY)).scalars(), default=START_S / QUIET_UPDATES)
    return max(QUIET_MIN_S, QUIET_UPDATES * longest)


def _learner_alarm(
    child: Mapping[str, Any] | None, silent_s: float | None, may_s: float, worked_ms: int, log: str, now_ms: int
) -> str:
    if child and child["state"] == "ended":
        return _ended("learner", child, log, now_ms)
    if child and child["ended_ms"] and child["ended_ms"] > worked_ms:
        times = "" if child["restarts"] < 2 else f", {child['restarts']} times since the launch"
        ago = duration_text((now_ms - child["ended_ms"]) / 1000)
        return (
            f"The learner {end_text(child['code'])}, {ago} ago{times}, and has finished no work since; it was "
            f"restarted. See {log} for the reason."
        )
    if silent_s is not None and silent_s > may_s:
        ago = duration_text(silent_s)
        return f"The learner has sent nothing for {ago}. See {log}, or the log on the learner's machine."
    return ""


def _other_alarm(name: str, child: Mapping[str, Any], log: str, now_ms: int) -> str:
    if name == "learner":
        return ""
    if child["state"] == "ended" and child["code"]:
        return _ended(name, child, log, now_ms)
    ended_ms = child["ended_ms"]
    if child["state"] == "crashed" or (child["restarts"] > 1 and now_ms - ended_ms < 1000 * CRASHED_LATELY_S):
        return f"The {name} {end_text(child['code'])}, {child['restarts']} times since the launch. See {log}."
    return ""


def _ended(name: str, child: Mapping[str, Any], log: str, now_ms: int) -> str:
    ago = duration_text((now_ms - child["since_ms"]) / 1000)
    return (
        f"The {name} {end_text(child['code'])}, {ago} ago, and is not restarted. See {log} for the reason, fix it, "
        "and launch the round again."
    )
