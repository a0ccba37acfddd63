"""Sybil: many identities gain no more with the same work than one does, by the real lottery, escrow and pledge.

- Leases, intake, draws, windows, faults, pledges and settlement are a coordinator's, on a real store. Only the replay
  is left out: an audit finds what is true of a claim.
- An identity goes by the plan that paid before there was a pledge: it works until not everything of it is audited, and
  forges whenever no window of its own is there to lose. It has as many groups as that takes; then the next one comes.
- The gain is what was paid beyond the work that was done: for forgeries, less what was voided of honest work, in
  payments for one honest group. Each forgery counts by the chance that the store drew it with, and costs what those
  that were found cost on the average. The luck of one secret, in which a forgery of 64 times the length may get
  through, would hide what the others lose.
- All of a crowd's effects share one transaction, since a sync of the disk for each takes longer than all else.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.config import AuditSection
from coordinator.rules import trust
from coordinator.store.facts import FINISHED, set_fact
from coordinator.store.tables import audits
from coordinator.transactions import escrow, standings
from ledger.drawing import ALL_PPM
from ledger.tables import claims_table
from protocol.policy import chunks
from protocol.wire.signing import NodeKey
from protocol.work.rollout import Sample, pack_logprobs, pack_tokens
from tests.coordinator.world import END, HONEST_TOKENS, SAMPLES, World, claim, honest_sample

MANY = 20
"""Identities of a crowd. They know nothing of each other, so a hundred gain five times as much."""

EACH = 12
"""Groups of each: ten that every newcomer has audited, one more until not everything is, and one to forge."""

WORK = 5 * EACH
"""Groups, of those who do nothing but honest work, or none."""

LONGEST = 64
"""Times an honest group, of the longest that a lease here allows."""

SEED = 2
"""A secret by which a forgery of each crowd is drawn and found."""

Plan = Callable[["Crowd", NodeKey], bool]
"""A plan that returns True if an identity forges its next group."""


class Crowd(World):
    """A round, and identities that come to it one after the other."""

    def __init__(self, folder: Path, *, pledged: bool = True) -> None:
        """Make a crowd; without `pledged`, an audited group is no pledge any more when a fault comes."""
        self._connection: sa.Connection | None = None
        super().__init__(folder, staleness=10_000, rules=AuditSection(), master=SEED.to_bytes(32), budget_micros=10**9)
        self._pledged = pledged
        self._forged = set[str]()
        longest = LONGEST * HONEST_TOKENS // SAMPLES
        self.terms = replace(self.terms, max_new_tokens=longest)
        bounds = replace(self.judge.bounds, max_new_tokens=longest)
        self.judge = replace(self.judge, terms=self.terms, bounds=bounds)

    def run(self, effect: Any, *arguments: Any, **named: Any) -> Any:
        if self._connection is None:
            return super().run(effect, *arguments, **named)
        return effect(self._connection, *arguments, **named)

    def play(self, identities: int, groups: int, plan: Plan, times: int) -> None:
        """Have so many identities share the work, and end the round."""

        def whole_round(connection: sa.Connection) -> None:
            self._connection = connection
            self.publish(1, 0)
            for number in range(identities):
                self._work(self.join(number + 1), groups // identities, plan, times)
            self.run(set_fact, FINISHED, True)
            self.release_leftovers()
            self._judge_all()
            assert self.audit() == []

        self.database.run_now(whole_round)
        self._connection = None

    def _work(self, key: NodeKey, groups: int, plan: Plan, times: int) -> None:
        for _ in range(groups):
            if self.run(standings.banned_ms, key.node_id) is not None:
                return
            forges = plan(self, key)
            lease = self.lease(key)
            payload = claim(lease, samples=(forgery(times) if forges else honest_sample(lease),) * SAMPLES).to_bytes()
            assert self.submit(key, key.seal("rollout", payload)).outcome == "accepted"
            claim_id = chunks.digest(payload)
            if forges:
                self._forged.add(claim_id)
                if not self._pledged:
                    self.run(unpledge, key.node_id)
            self.run(escrow.used, [claim_id], terms=self.audits, now_ms=self.now_ms)
            self._judge_all()

    def _judge_all(self) -> None:
        for claim_id in self.take_cases():
            self.find(claim_id, "hard" if claim_id in self._forged else "pass")

    def gain(self) -> float:
        """Return the gain of all identities, in payments for one honest group."""
        columns = (audits.c.claim_id, audits.c.rate_ppm, audits.c.finding)
        query = sa.select(*columns, claims_table.c.amount_micros, claims_table.c.state).join_from(
            audits, claims_table, claims_table.c.claim_id == audits.c.claim_id
        )
        rows = self.database.run_now(lambda connection: connection.execute(query).all())
        forged = [row for row in rows if row.claim_id in self._forged]
        assert all((row.state == "posted") == (row.finding is None) for row in forged), "paid unless it was drawn"
        honest = [row for row in rows if row.claim_id not in self._forged]
        assert {row.state for row in honest} <= {"posted", "voided"}
        hard = sum(row.finding == "hard" for row in forged)
        assert hard, "nothing was forged and found"
        lost = sum(row.amount_micros for row in honest if row.state == "voided")
        drawn = sum(row.rate_ppm for row in forged) / ALL_PPM  # as many as were to be expected
        cost = drawn * lost / hard
        paid = sum(row.amount_micros * (1 - row.rate_ppm / ALL_PPM) for row in forged)
        luck = sum(row.amount_micros for row in forged if row.state == "posted") - lost
        gained = float(paid - cost) / HONEST_TOKENS
        print(
            f"seed {SEED}: {len(rows)} groups, {len(forged)} forged: gain {gained:+.2f}, "
            f"by this secret's draws {luck / HONEST_TOKENS:+.2f}"
        )
        return gained


def forgery(times: int) -> Sample:
    """Return forged work, `times` as long as honest work."""
    length = times * HONEST_TOKENS // SAMPLES
    return Sample(tokens=pack_tokens([9] * (length - 1) + [END]), logprobs=pack_logprobs([0.0] * length), finish="stop")


def unpledge(connection: sa.Connection, owner: str) -> None:
    """Sabotage: enter what was found right as parts of groups, which are never a pledge."""
    connection.execute(sa.update(audits).where((audits.c.owner == owner) & escrow.GOOD).values(groups=0))


def never(_crowd: Crowd, _key: NodeKey) -> bool:
    return False


def at_once(_crowd: Crowd, _key: NodeKey) -> bool:
    return True


def with_no_window_to_lose(crowd: Crowd, key: NodeKey) -> bool:
    """Return True while not everything is audited."""
    unseen = sa.select(audits.c.claim_id).where((audits.c.owner == key.node_id) & escrow.UNSEEN)
    held = crowd.run(lambda connection: connection.execute(unseen).first())
    standing = crowd.run(standings.find_standing, key.node_id)
    return held is None and trust.rate_ppm(standing, crowd.audits.settings) < ALL_PPM


def gain(folder: Path, identities: int, *, times: int, pledged: bool = True) -> float:
    """Return the gain of `identities` that share the work of many."""
    crowd = Crowd(folder, pledged=pledged)
    crowd.play(identities, MANY * EACH, with_no_window_to_lose, times)
    gained = crowd.gain()
    crowd.database.close()
    return gained


def owed(folder: Path, identities: int, plan: Plan) -> int:
    """Return the credit of `identities` that share less work, all by one plan."""
    crowd = Crowd(folder)
    crowd.play(identities, WORK, plan, 1)
    total = sum(crowd.owed(NodeKey((number + 1).to_bytes(32)).node_id)[1] for number in range(identities))
    crowd.database.close()
    return total


@pytest.mark.parametrize("identities", [1, 5])
def test_honest_work_pays_the_same_by_however_many_identities(tmp_path: Path, identities: int) -> None:
    assert owed(tmp_path, identities, never) == WORK * HONEST_TOKENS


@pytest.mark.parametrize("identities", [1, WORK])
def test_forgeries_from_the_first_group_pay_nothing_by_however_many_identities(tmp_path: Path, identities: int) -> None:
    assert owed(tmp_path, identities, at_once) == 0


@pytest.mark.parametrize("times", [1, 4, LONGEST])
def test_many_identities_that_forge_gain_no_more_than_one(tmp_path: Path, times: int) -> None:
    single = gain(tmp_path, 1, times=times)
    many = gain(tmp_path, MANY, times=times)
    assert many < single < 0


def test_many_identities_would_gain_if_a_fault_took_no_pledge(tmp_path: Path) -> None:
    single = gain(tmp_path, 1, times=4, pledged=False)
    many = gain(tmp_path, MANY, times=4, pledged=False)
    assert many > single > 0
