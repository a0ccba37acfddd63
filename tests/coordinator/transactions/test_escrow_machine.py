"""Random histories of audits: no credit twice, none for what was found wrong, everything settled at the end.

- A clerk beside the store keeps plain lists of what was earned, found and posted, and counts again after every step.
- Histories hold honest and dishonest owners, groups that two of them worked on, suspicion, late and repeated verdicts,
  auditors that die, and restarts.
"""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator.config import AuditSection
from coordinator.rules import trust
from coordinator.rules.trust import Finding
from coordinator.store import tables
from coordinator.store.facts import FINISHED, set_fact
from coordinator.transactions import appeals, standings, tally
from ledger.tables import claims_table
from protocol.errors import OwnerBanned
from protocol.work.appeal import Appeal, seal_appeal
from tests.coordinator.world import HONEST_TOKENS, ROUND, World, answer

BUDGET = 10_000
RULES = AuditSection(first_groups=2, floor=0.25, trusted_groups=12, trusted_floor=0.2)
"""A window of three to four groups, reached after eight."""


class Escrow(RuleBasedStateMachine):
    """A round with two owners."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.world = World(Path(self.folder.name), staleness=1000, budget_micros=BUDGET, rules=RULES, epoch_groups=5)
        self.world.publish(1, 0)
        self.keys = [self.world.join(number) for number in (1, 2)]
        self.earned: dict[str, list[str]] = {key.node_id: [] for key in self.keys}
        self.worth: dict[str, int] = {}
        """Micro-units of each claim."""
        self.found: dict[str, Finding] = {}
        self.posted: set[str] = set()
        self.windows = dict.fromkeys(self.earned, 0)
        """The windows as they were after the step before."""
        self.batch = 0
        self.given_back: set[str] = set()
        """Claims that an appeal has paid."""

    def teardown(self) -> None:
        """The end of the round: audits first, then everything is settled."""
        self.world.run(set_fact, FINISHED, True)
        self.world.release_leftovers()
        self.world.now_ms += self.world.audits.timeout_ms
        while claims := self.world.take_cases("last"):
            for claim in claims:
                assert self.world.find(claim, "pass")
                self.found[claim] = "pass"
        self.the_books_are_right()
        assert "pending" not in self.states().values()
        assert self.world.audit() == []
        self.world.database.close()
        self.folder.cleanup()

    @rule(who=st.integers(0, 1), groups=st.integers(1, 4))
    def an_owner_works(self, who: int, groups: int) -> None:
        for _ in range(groups):
            try:
                lease_id = self.world.earn(self.keys[who]).lease_id
            except OwnerBanned:
                assert self.faults(self.keys[who].node_id) == 2
                return
            (claim,) = [row["claim_id"] for row in self.world.rows(tables.rollouts) if row["lease_id"] == lease_id]
            self._earns(who, claim, HONEST_TOKENS)

    @rule(who=st.integers(0, 1))
    def an_owner_finishes_what_the_other_left(self, who: int) -> None:
        heir = self.keys[1 - who]
        try:
            lease = self.world.leave(self.keys[who], {0: [77]}, heir=heir)
        except OwnerBanned:
            assert 2 in [self.faults(key.node_id) for key in self.keys]
            return
        assert self.world.submit(heir, answer(heir, lease)).outcome == "accepted"
        part = self.world.rows(tables.parts)[-1]
        self._earns(who, part["claim_id"], 1)
        self._earns(1 - who, part["whole"], HONEST_TOKENS - 1)

    def _earns(self, who: int, claim: str, micros: int) -> None:
        self.earned[self.keys[who].node_id].append(claim)
        self.worth[claim] = micros

    @rule(finding=st.sampled_from(["pass", "pass", "pass", "pass", "soft", "hard", "pardon"]), count=st.integers(1, 4))
    def an_auditor_judges(self, finding: Finding, count: int) -> None:
        for number, claim in enumerate(self.world.take_cases("a", count)):
            said: Finding = finding if number == 0 else "pass"
            counted = self.world.find(claim, said)
            assert counted or self.faults(self.owner(claim)) == 2, "only a ban ends a wait"
            if counted:
                self.found[claim] = said
            self.the_books_are_right()
            assert not self.world.find(claim, "hard"), "the first word counts"

    @rule()
    def an_auditor_dies(self) -> None:
        self.world.take_cases("b", 1)
        self.world.now_ms += self.world.audits.timeout_ms // 2

    @rule(suspects=st.booleans())
    def the_learner_trains(self, suspects: bool) -> None:
        batch = self.world.batch(self.batch + 1)
        if batch is not None:
            self.batch += 1
            self.world.report(self.batch, [batch.groups[0].claim_id] if suspects else [])

    @rule(data=st.data(), outcome=st.sampled_from(["granted", "granted", "denied"]))
    def an_owner_appeals_and_the_operator_rules(self, data: st.DataObject, outcome: appeals.Ruled) -> None:
        before = self.states()
        void = sorted(claim for claim, state in before.items() if state == "voided")
        if not void:
            return
        key = next(key for key in self.keys if key.node_id == self.owner(void[0]))
        mine = [claim for claim in void if claim in self.earned[key.node_id]]
        said = Appeal(round_id=ROUND, about=data.draw(st.sampled_from(mine)), reason="")
        envelope = seal_appeal(key, said)
        reply = self.world.run(appeals.record_appeal, envelope, round_id=ROUND, now_ms=self.world.now_ms)
        given = {"given_by": "me", "audit": RULES, "now_ms": self.world.now_ms}
        done = self.world.run(appeals.rule, reply.number, outcome, "because", "", **given)
        after = self.states()
        paid = {claim for claim in before if before[claim] != after[claim]}
        assert all((before[claim], after[claim]) == ("voided", "posted") for claim in paid)
        assert (len(paid), sum(self.worth[claim] for claim in paid)) == (
            done["reinstated_claims"], done["reinstated_micros"],
        )  # fmt: skip
        assert paid <= set(mine)
        if done["changed"] and outcome == "granted":
            assert reply.claim_id in paid, "what was at fault is paid"
            self.given_back |= paid
        else:
            assert not paid, "nothing is paid twice, nor by a ruling against it"
        assert not self.world.run(appeals.rule, reply.number, "granted", "again", "", **given)["changed"]

    @rule()
    def the_coordinator_restarts(self) -> None:
        self.world.reopen()

    @invariant()
    def what_is_tallied_is_what_there_is(self) -> None:
        assert self.world.run(tally.read) == self.world.run(tally.counted)

    @invariant()
    def the_books_are_right(self) -> None:
        states = self.states()
        assert sorted(states) == sorted(claim for claims in self.earned.values() for claim in claims)
        posted = {claim for claim, state in states.items() if state == "posted"}
        assert self.posted <= posted, "what was posted stays posted"
        for claim in posted - self.posted - self.given_back:
            self._may_be_posted(claim)
        self.posted = posted
        for owner in self.windows:
            self.windows[owner] = trust.window(self.world.run(standings.find_standing, owner), RULES)
        taken = {row["claim_id"] for row in self.world.rows(tables.audits) if row["fault"]}
        for claim in taken - self.given_back:
            assert states[claim] == "voided", "a fault takes the window before it"
        for fault in {row["fault"] for row in self.world.rows(tables.audits) if row["fault"]}:
            theirs = [row["claim_id"] for row in self.world.rows(tables.audits) if row["fault"] == fault]
            proven = [claim for claim in theirs if self.found.get(claim) in ("pass", "soft")]
            assert len(proven) <= 1, "but of what was judged only the pledge"
        for claim, finding in self.found.items():
            if claim not in self.given_back and self.faults(self.owner(claim)) < 2:
                assert (states[claim] == "voided") == (finding == "hard" or claim in taken)
            assert finding not in ("pass", "soft") or states[claim] != "voided" or claim in taken
        for key in self.keys:
            mine = self.earned[key.node_id]
            owed = tuple(self._micros(mine, states, state) for state in ("pending", "posted"))
            assert self.world.owed(key.node_id) == owed
            if self.faults(key.node_id) == 2:
                assert self._buffered(mine) == 0
        wrong = [claim for claim, finding in self.found.items() if finding == "hard"]
        assert self._buffered(wrong) == 0
        voided = self._micros(states, states, "voided")
        assert self.world.budget() == BUDGET - sum(self.worth.values()) + voided

    def _micros(self, claims: Iterable[str], states: dict[str, str], state: str) -> int:
        return sum(self.worth[claim] for claim in claims if states[claim] == state)

    def _may_be_posted(self, claim: str) -> None:
        """Used, and proven right or with a closed window."""
        rows = {row["claim_id"]: row for row in self.world.rows(tables.audits)}
        assert rows[claim]["used"]
        assert self.found.get(claim) != "hard"
        if self.found.get(claim) in ("pass", "soft") or self._finished():
            return
        owner = self.owner(claim)
        later = [other for other in self.earned[owner] if rows[other]["place"] > rows[claim]["place"]]
        unproven = [other for other in later if not rows[other]["why"] or self.found.get(other) == "pardon"]
        standing = self.world.run(standings.find_standing, owner)
        assert trust.level(standing, RULES) != "held"
        groups = sum(rows[other]["groups"] for other in unproven)
        assert groups >= min(self.windows[owner], trust.window(standing, RULES))

    def _finished(self) -> bool:
        return any(row["name"] == "finished" for row in self.world.rows(tables.facts))

    def _buffered(self, claims: list[str]) -> int:
        """Return the number of groups of these claims in the learner's buffer."""
        wholes = {row["whole"] for row in self.world.rows(tables.parts) if row["claim_id"] in claims}.union(claims)
        return sum(row["state"] == "buffered" and row["claim_id"] in wholes for row in self.world.rows(tables.rollouts))

    def states(self) -> dict[str, str]:
        return {row["claim_id"]: row["state"] for row in self.world.rows(claims_table)}

    def owner(self, claim: str) -> str:
        return next(owner for owner, claims in self.earned.items() if claim in claims)

    def faults(self, owner: str) -> int:
        """Hard fails, as far as they are not forgotten."""
        standing = self.world.run(standings.find_standing, owner)
        return min(2, int(standing.hard))


TestEscrow = Escrow.TestCase
TestEscrow.settings = settings(max_examples=6, stateful_step_count=15, deadline=None)
