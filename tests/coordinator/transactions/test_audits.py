"""Cases of auditors: each belongs to one auditor while that is at work on it, and a case that kills auditors ends."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config import AuditSection
from coordinator.rules.trust import Finding
from coordinator.store import tables
from coordinator.transactions import audits
from coordinator.transactions.audits import TRIES_MAX
from protocol.wire.signing import NodeKey
from tests.coordinator.world import HONEST_TOKENS, PRICE, World, answer


@pytest.fixture
def audited(tmp_path: Path, store_url: str) -> Iterator[World]:
    """A round in which an owner's first ten groups are all audited."""
    made = World(tmp_path, staleness=100, rules=AuditSection(), postgres_url=store_url)
    made.publish(1, 0)
    yield made
    made.database.close()


def earn(world: World, key: NodeKey, groups: int = 1) -> list[str]:
    """The claims of so many groups."""
    before = len(world.rows(tables.rollouts))
    for _ in range(groups):
        world.earn(key)
    return [row["claim_id"] for row in world.rows(tables.rollouts)[before:]]


def hold(world: World, auditor: str) -> int:
    held: int = world.run(audits.extend_cases, auditor, terms=world.audits, now_ms=world.now_ms)
    return held


def pass_time(world: World, timeouts: float = 1.0) -> None:
    world.now_ms += int(timeouts * world.audits.timeout_ms)


def column(world: World, name: str) -> dict[str, object]:
    """Return a column by claim, in the order of their credit."""
    return {row["claim_id"]: row[name] for row in world.rows(tables.audits)}


def test_two_auditors_never_have_the_same_case(audited: World) -> None:
    claims = earn(audited, audited.join(1), 3)
    first, second = audited.take_cases("one", 2), audited.take_cases("two", 2)
    assert (first, second) == (claims[:2], claims[2:])


def test_an_auditor_that_comes_back_is_given_its_cases_again_one_by_one(audited: World) -> None:
    """A case may be the reason why the auditor restarted."""
    claims = earn(audited, audited.join(1), 3)
    assert audited.take_cases("one", 2) == claims[:2]
    audited.reopen()
    assert audited.take_cases("one", 2) == claims[2:], "what nobody was lost with comes first"
    for claim in claims[2:]:
        audited.find(claim)
    for claim in claims[:2]:
        assert audited.take_cases("one", 2) == [claim]
        audited.find(claim)
    assert set(column(audited, "finding").values()) == {"pass"}


def test_the_cases_of_an_auditor_that_was_killed_go_to_another(audited: World) -> None:
    claims = earn(audited, audited.join(1), 2)
    audited.take_cases("one")
    assert audited.take_cases("two") == []
    pass_time(audited)
    for claim in claims:
        assert audited.take_cases("two") == [claim]
        audited.find(claim)


def test_the_cases_of_slow_auditors_stay_theirs_as_long_as_they_are_at_work(audited: World) -> None:
    """However many others ask meanwhile, which is what an operator starts when audits are behind."""
    claims = earn(audited, audited.join(1), 5)
    assert [audited.take_cases("one", 2), audited.take_cases("two", 2)] == [claims[:2], claims[2:4]]
    audited.take_cases("three")
    audited.find(claims[4])
    for _ in range(10 * TRIES_MAX):
        pass_time(audited, 0.5)
        assert [hold(audited, "one"), hold(audited, "two"), hold(audited, "three")] == [2, 2, 0]
        assert audited.take_cases("three") == []
    assert set(column(audited, "tries").values()) == {0}
    for claim in claims[:4]:
        assert audited.find(claim)
    assert set(column(audited, "finding").values()) == {"pass"}


def test_a_slow_auditor_that_is_killed_in_the_end_loses_its_cases_after_one_time(audited: World) -> None:
    claims = earn(audited, audited.join(1), 2)
    audited.take_cases("one")
    for _ in range(5):
        pass_time(audited, 0.9)
        hold(audited, "one")
    pass_time(audited, 0.9)
    assert audited.take_cases("two") == []
    pass_time(audited, 0.1)
    assert audited.take_cases("two") == claims[:1]
    assert hold(audited, "one") == 0
    assert column(audited, "tries") == {claims[0]: 1, claims[1]: 1}


def test_a_late_verdict_counts_if_nobody_was_faster(audited: World) -> None:
    (claim,) = earn(audited, audited.join(1))
    audited.take_cases("one")
    pass_time(audited)
    audited.take_cases("two")
    assert audited.find(claim)


@pytest.mark.parametrize("same", [False, True], ids=["each another one", "one that is started again"])
def test_a_case_that_kills_auditors_is_pardoned_in_the_end_and_the_others_are_judged(
    audited: World, same: bool
) -> None:
    """Forgeries hidden behind one of those cases would all be paid unseen."""
    claims = earn(audited, audited.join(1), 5)
    poison, deaths = claims[2], 0
    for number in range(20):
        taken = audited.take_cases("one" if same else f"auditor {number}", 4)
        if poison in taken:
            deaths += 1
            if not same:
                pass_time(audited)
            continue
        for claim in taken:
            assert audited.find(claim)
    found = column(audited, "finding")
    assert found.pop(poison) == "pardon"
    assert deaths == TRIES_MAX
    assert set(found.values()) == {"pass"}
    assert audited.audit() == []


EXACT = "exact/fp32/cpu-0123456789ab"


def paid(world: World, key: NodeKey, numerics: str) -> tuple[int, int]:
    """The price of a lease, and what its claim is worth to the ledger."""
    (lease,) = world.offer(key, numerics=numerics).leases
    before = sum(world.owed(key.node_id))
    assert world.submit(key, answer(key, lease)).outcome == "accepted"
    return lease.price_micros_per_mtok, sum(world.owed(key.node_id)) - before


def judge_all(world: World, *classes: str, finding: Finding = "pass") -> None:
    """An auditor that names these classes judges every claim that waits."""
    taken = world.run(audits.assign_cases, "one", 64, classes, terms=world.audits, now_ms=world.now_ms)
    for case in taken.cases:
        assert world.find(case.claim_id, finding)


REGULAR, RAISED = (PRICE, HONEST_TOKENS), (PRICE * 3 // 2, HONEST_TOKENS * 3 // 2)


@pytest.fixture
def proven(audited: World) -> World:
    """A round with a bonus, in which the first node's work has the bits of an auditor's class."""
    audited.terms = replace(audited.terms, exact_bonus=0.5)
    assert paid(audited, audited.join(1), EXACT) == REGULAR, "no auditor has met such a claim yet"
    judge_all(audited, "torch/bf16/cpu", EXACT)
    return audited


def test_only_a_node_whose_bits_an_auditor_found_equal_is_paid_more(proven: World) -> None:
    """A bonus for any class called exact would be a price for a word."""
    key = proven.join(1)
    assert [paid(proven, key, name) for name in ("torch/fp32/cpu", EXACT[:-1] + "c", EXACT)] == [
        REGULAR,
        REGULAR,
        RAISED,
    ]
    assert paid(proven, proven.join(2), EXACT) == REGULAR, "another node has proven nothing"
    proven.terms = replace(proven.terms, tolerance="torch/fp32/cpu")  # all are judged alike: nobody looks at bits
    assert paid(proven, key, EXACT) == REGULAR
    proven.terms = replace(proven.terms, tolerance="")
    judge_all(proven, EXACT[:-1] + "d")
    assert paid(proven, key, EXACT) == REGULAR, "the auditor moved to another kind of processor"
    assert proven.audit() == []


def test_other_bits_end_the_bonus_until_they_are_equal_again(proven: World) -> None:
    """Torch's float32 mostly fails softly against the exact class, and is paid."""
    key = proven.join(1)
    assert paid(proven, key, EXACT) == RAISED
    judge_all(proven, EXACT, finding="soft")
    assert paid(proven, key, EXACT) == REGULAR
    judge_all(proven, EXACT)
    assert paid(proven, key, EXACT) == RAISED


def test_the_class_of_an_auditor_that_is_gone_or_has_none_any_more_ends(proven: World) -> None:
    key = proven.join(1)
    judge_all(proven, EXACT)
    proven.now_ms += audits.NAMED_MS // 2
    assert paid(proven, key, EXACT) == RAISED, "a replay can take hours"
    judge_all(proven)  # it names no class, and judges a claim of one
    proven.now_ms += audits.SILENT_MS
    assert proven.run(audits.exact_classes, proven.now_ms) == set()
    judge_all(proven, EXACT)
    assert proven.run(audits.exact_classes, proven.now_ms) == {EXACT}
    proven.now_ms += audits.NAMED_MS
    assert proven.run(audits.exact_classes, proven.now_ms) == set()


def test_auditors_lose_nothing_while_the_coordinator_is_away(audited: World) -> None:
    """The auditors work meanwhile, and cannot report it."""
    (claim,) = earn(audited, audited.join(1))
    audited.take_cases("one")
    for _ in range(TRIES_MAX + 1):
        pass_time(audited, 5)
        audited.reopen()
        audited.run(audits.resume, terms=audited.audits, now_ms=audited.now_ms)
        pass_time(audited, 0.9)
        assert audited.take_cases("two") == []
        assert hold(audited, "one") == 1
    assert column(audited, "tries") == {claim: 0}
    assert audited.find(claim)


def test_without_an_auditor_training_goes_on_until_the_backlog_is_full(audited: World) -> None:
    key = audited.join(1)
    audited.terms = replace(audited.terms, audit_backlog_max=2)
    claims = earn(audited, key, 2)
    reply = audited.offer(key)
    assert (reply.leases, reply.reason) == ((), "audits")
    assert audited.batch(1) is not None
    audited.find(claims[0])
    audited.lease(key)
