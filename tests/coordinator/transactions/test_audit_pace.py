"""Pace of the auditors: the effects of a backlog, and the operator's warning before work stops."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import AuditSection, Config, parse
from coordinator.reports import overview, summary
from coordinator.store import tables
from coordinator.transactions import audit_pace, audits, standings
from ledger.drawing import ALL_PPM
from protocol.wire.signing import NodeKey
from protocol.work.auditing import Judged
from tests.coordinator.world import HONEST_TOKENS, World

BACKLOG_MAX = 8
CONFIG: Config = parse({"audit": {"backlog_max": BACKLOG_MAX}})


@pytest.fixture
def audited(tmp_path: Path, store_url: str) -> Iterator[World]:
    made = World(tmp_path, staleness=100, budget_micros=10**9, rules=AuditSection(), postgres_url=store_url)
    made.audits = replace(made.audits, settings=CONFIG.audit)
    made.judge = replace(made.judge, audits=made.audits)
    made.publish(1, 0)
    yield made
    made.database.close()


def judge(world: World, claims: list[str], seconds: float, threads: int = 2) -> None:
    """An auditor judges these and says how long it took."""
    verdicts = tuple(Judged(claim_id=one, finding="pass", validator="replay/1", report=b"{}") for one in claims)
    world.run(
        audits.record_verdicts, verdicts, seconds=seconds, threads=threads, terms=world.audits, now_ms=world.now_ms
    )


def status_of(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.run(
        summary.for_operator, config=CONFIG, alive_since_ms=world.now_ms, now_ms=world.now_ms
    )
    return found


def rates(world: World, key: NodeKey) -> list[int]:
    owner = world.run(standings.owner_of, key.node_id)
    return [row["rate_ppm"] for row in world.rows(tables.audits) if row["owner"] == owner]


@pytest.mark.parametrize(
    ("backlog", "eased"), [(0, 0), (127, 0), (128, 1 / 3), (256, 2 / 3), (384, 1), (512, 1), (5000, 1)]
)
def test_rates_fall_by_steps_from_a_quarter_of_the_largest_backlog_on(backlog: int, eased: float) -> None:
    assert audit_pace.rate_factor(backlog, 512) == pytest.approx(eased)


def test_status_says_that_auditors_do_not_keep_up_before_no_work_is_offered(audited: World) -> None:
    key = audited.join(1)
    for _ in range(2):
        audited.earn(key)
    claims = audited.take_cases()
    judge(audited, claims[:1], seconds=2.0)
    assert audit_pace.alarm(audited.run(audit_pace.measure, audited.now_ms), BACKLOG_MAX) == ""
    audited.now_ms += 1000
    for _ in range(3):
        audited.earn(key)
    found = status_of(audited)
    speed, incoming = HONEST_TOKENS / 2, 3 * HONEST_TOKENS
    assert found["audit_pace"]["auditor_tokens_per_s"] == speed
    assert found["audit_pace"]["incoming_tokens_per_s"] == incoming
    assert found["audit_pace"]["auditors_needed"] == 6
    assert found["backlog"] < BACKLOG_MAX, "work still goes on"
    assert "Auditors do not keep up: 4 claims of " in found["alarm"]
    assert "6 auditors with 2 threads each would keep up" in found["alarm"]
    shown = overview.text(found | summary.public_settings(CONFIG, "0" * 64))
    assert f"an auditor checks {speed:,.0f} tokens/s, {incoming:,.0f} tokens/s arrive" in shown


def test_what_auditors_are_behind_by_is_the_operators_alone(audited: World) -> None:
    key = audited.join(1)
    for _ in range(4):
        audited.earn(key)
    public = audited.run(summary.explained, config=CONFIG, alive_since_ms=audited.now_ms, now_ms=audited.now_ms)
    assert "audit_pace" not in public
    assert "keep up" not in public["alarm"]
    assert "No auditor has judged anything yet" in status_of(audited)["alarm"]


def test_while_claims_wait_known_owners_are_audited_less_and_paid_later(audited: World) -> None:
    """Newcomers are audited as always."""
    known, newcomers = audited.join(1), audited.join(2)
    audited.prove(known, 40)
    audited.earn(known)
    assert rates(audited, known) == [ALL_PPM], "nothing is held yet"
    (first,) = audited.take_cases()
    assert audited.find(first), "now a pledge is"
    for _ in range(6):
        audited.earn(newcomers)
    for _ in range(30):
        audited.earn(known)
    assert rates(audited, newcomers) == [ALL_PPM] * 6
    eased = rates(audited, known)[-1]
    assert eased < 100_000, "10 in 71 are more"
    audited.run(_nothing_waits)
    audited.earn(known)
    assert rates(audited, known)[-1] > 130_000, "as set again"


def _nothing_waits(connection: Any) -> None:
    connection.execute(tables.audits.update().where(tables.WAITS).values(finding="pass"))
