"""Random histories of audits: no credit twice, none for what was found wrong, everything settled at the end.

- A clerk beside the store keeps plain lists of what was earned, found and posted, and counts again after every step.
- Histories hold honest and dishonest owners, suspicion, late and repeated verdicts, auditors that die, and restarts.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator import standings, tables
from coordinator.audit import trust
from coordinator.audit.trust import Finding, Rules
from coordinator.state import set_fact
from ledger.tables import claims_table
from protocol.errors import OwnerBanned
from tests.coordinator.world import HONEST_TOKENS, World

BUDGET = 10_000
RULES = Rules(first_groups=2, floor=0.25, trusted_groups=12, trusted_floor=0.2)
"""A window of three to four groups, reached after eight."""


class Escrow(RuleBasedStateMachine):
    """One round with two owners."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.world = World(Path(self.folder.name), staleness=1000, budget_micros=BUDGET, rules=RULES, epoch_groups=5)
        self.world.publish(1, 0)
        self.keys = [self.world.join(number) for number in (1, 2)]
        self.earned: dict[str, list[str]] = {key.node_id: [] for key in self.keys}
        self.found: dict[str, Finding] = {}
        self.posted: set[str] = set()
        self.windows = dict.fromkeys(self.earned, 0)
        """As they were after the step before."""
        self.batch = 0

    def teardown(self) -> None:
        """The end of the round: audits first, then everything is settled."""
        self.world.run(set_fact, "finished", True)
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
            self.earned[self.keys[who].node_id].append(claim)

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

    @rule()
    def the_coordinator_restarts(self) -> None:
        self.world.reopen()

    @invariant()
    def the_books_are_right(self) -> None:
        states = self.states()
        assert sorted(states) == sorted(claim for claims in self.earned.values() for claim in claims)
        posted = {claim for claim, state in states.items() if state == "posted"}
        assert self.posted <= posted, "what was posted stays posted"
        for claim in posted - self.posted:
            self._may_be_posted(claim)
        self.posted = posted
        for owner in self.windows:
            self.windows[owner] = trust.window(self.world.run(standings.of, owner), RULES)
        for claim, finding in self.found.items():
            assert (states[claim] == "voided") == (finding == "hard") or self.faults(self.owner(claim)) == 2
            assert finding not in ("pass", "soft") or states[claim] != "voided", "what was proven is never taken"
        for key in self.keys:
            mine = [states[claim] for claim in self.earned[key.node_id]]
            owed = tuple(HONEST_TOKENS * mine.count(state) for state in ("pending", "posted"))
            assert self.world.owed(key.node_id) == owed
            if self.faults(key.node_id) == 2:
                assert self._buffered(key.node_id) == 0
        voided = HONEST_TOKENS * list(states.values()).count("voided")
        assert self.world.budget() == BUDGET - HONEST_TOKENS * len(states) + voided

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
        standing = self.world.run(standings.of, owner)
        assert trust.level(standing, RULES) != "held"
        assert len(unproven) >= min(self.windows[owner], trust.window(standing, RULES))

    def _finished(self) -> bool:
        return any(row["name"] == "finished" for row in self.world.rows(tables.facts))

    def _buffered(self, owner: str) -> int:
        return sum(row["state"] == "buffered" and row["node_id"] == owner for row in self.world.rows(tables.rollouts))

    def states(self) -> dict[str, str]:
        return {row["claim_id"]: row["state"] for row in self.world.rows(claims_table)}

    def owner(self, claim: str) -> str:
        return next(owner for owner, claims in self.earned.items() if claim in claims)

    def faults(self, owner: str) -> int:
        """Hard fails, as far as they are not forgotten."""
        standing = self.world.run(standings.of, owner)
        return min(2, int(standing.hard))


TestEscrow = Escrow.TestCase
TestEscrow.settings = settings(max_examples=6, stateful_step_count=15, deadline=None)
