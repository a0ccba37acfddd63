"""The pure book: the whole transition table, refusals that change nothing, conservation that notices."""

import itertools
from functools import reduce

import pytest

from ledger import book
from ledger.accounts import BUDGET, OUTSIDE, payable, paying, pending
from ledger.accounts import paid as paid_to
from ledger.book import TRANSITIONS, BookBroken, BookState, ClaimState, EntryOutcome
from ledger.entry import DEPOSITS_MAX_MICROS, Entry
from tests.ledger.values import (
    appeal,
    applied,
    batch,
    claim,
    commitment,
    credit,
    deposit,
    node,
    owner_act,
    paid,
    payout,
    post,
    reinstate,
    reveal,
    root,
    ruling,
    verdict,
    version,
    void,
)

EVENTS: dict[str, Entry] = {
    "pending": credit(1),
    "post": post(1),
    "void": void(1),
    "reinstate": reinstate(1),
    "payout": payout(1),
    "paid": paid(1),
}
OF_A_CLAIM, OF_A_PAYOUT = ("pending", "post", "void", "reinstate"), ("payout", "paid")
GRANTED: list[Entry] = [appeal(1), ruling(1)]
PAYOUT = payout(1).claim_id
EARNED: list[Entry] = [deposit(1_000), credit(1), post(1), credit(2, of=2), post(2)]
"""Two nodes are owed 300 each."""

PATHS: dict[ClaimState, list[Entry]] = {
    ClaimState.ABSENT: [],
    ClaimState.PENDING: [credit(1)],
    ClaimState.POSTED: [credit(1), post(1)],
    ClaimState.VOIDED: [credit(1), void(1)],
    ClaimState.PAYING: [credit(1), post(1), batch(1), payout(1)],
    ClaimState.PAID: [credit(1), post(1), batch(1), payout(1), paid(1)],
}
"""The entries by which a claim or a payout gets into each state."""


def after(*entries: Entry) -> BookState:
    """The book after entries that must all be applied."""
    state = BookState()
    for entry in entries:
        state, outcome = applied(state, entry)
        assert outcome is EntryOutcome.APPLIED
    return state


def test_the_table_is_complete() -> None:
    payouts = (ClaimState.ABSENT, ClaimState.PAYING, ClaimState.PAID)
    claims = [state for state in ClaimState if state is ClaimState.ABSENT or state not in payouts]
    pairs = [*itertools.product(claims, OF_A_CLAIM), *itertools.product(payouts, OF_A_PAYOUT)]
    assert set(TRANSITIONS) == set(pairs)


@pytest.mark.parametrize(("state", "kind"), list(TRANSITIONS), ids=lambda value: str(value))
def test_every_pair_of_the_table_does_what_it_says(state: ClaimState, kind: str) -> None:
    path = PATHS[state] if state is not ClaimState.ABSENT or kind != "payout" else [credit(1), post(1), batch(1)]
    before = after(deposit(1_000), *path, *GRANTED)
    found, outcome = applied(before, EVENTS[kind])
    target = TRANSITIONS[state, kind]
    if isinstance(target, ClaimState):
        assert outcome is EntryOutcome.APPLIED
        assert found.claims[PAYOUT if kind in OF_A_PAYOUT else claim(1)].state is target
    else:
        assert (found, outcome) == (before, target)


def test_every_state_but_absent_is_reached_and_the_last_ones_are_final_but_for_an_appeal() -> None:
    targets = [target for target in TRANSITIONS.values() if isinstance(target, ClaimState)]
    assert set(targets) == set(ClaimState) - {ClaimState.ABSENT}
    for state, kinds in (
        (ClaimState.POSTED, OF_A_CLAIM),
        (ClaimState.VOIDED, ("pending", "post", "void")),
        (ClaimState.PAID, OF_A_PAYOUT),
    ):
        assert all(isinstance(TRANSITIONS[state, kind], EntryOutcome) for kind in kinds)


def test_balances_follow_a_claim() -> None:
    state = after(deposit(1_000), credit(1), credit(2), credit(3, of=2))
    assert state.balances == {OUTSIDE: -1_000, BUDGET: 100, pending(node(1)): 600, pending(node(2)): 300}
    settlements: list[Entry] = [post(1), void(2)]
    state = reduce(lambda seen, entry: applied(seen, entry)[0], settlements, state)
    assert state.balances == {
        OUTSIDE: -1_000,
        BUDGET: 400,
        pending(node(1)): 0,
        payable(node(1)): 300,
        pending(node(2)): 300,
    }


@pytest.mark.parametrize("path", [path for path in PATHS.values() if path], ids=lambda path: path[-1].kind)
def test_claim_resubmitted_for_more_tokens_or_another_node_is_a_conflict(path: list[Entry]) -> None:
    before = after(deposit(1_000), *path)
    assert applied(before, credit(1, tokens=101)) == (before, EntryOutcome.CONFLICT)
    assert applied(before, credit(1, of=2)) == (before, EntryOutcome.CONFLICT)


def test_deposit_counts_once_and_its_reference_means_one_amount() -> None:
    before = after(deposit(1_000))
    assert applied(before, deposit(1_000)) == (before, EntryOutcome.ALREADY_APPLIED)
    assert applied(before, deposit(999)) == (before, EntryOutcome.CONFLICT)
    assert after(deposit(1_000), deposit(1_000, "wire-2")).balance(BUDGET) == 2_000


@pytest.mark.parametrize(
    ("budget", "outcome"),
    [
        (299, EntryOutcome.BUDGET_EXHAUSTED),  # one micro short
        (300, EntryOutcome.APPLIED),  # to the last micro
        (301, EntryOutcome.APPLIED),
    ],
)
def test_budget_is_spent_to_the_last_micro_and_no_further(budget: int, outcome: EntryOutcome) -> None:
    before = after(deposit(budget))
    state, found = applied(before, credit(1))
    assert found is outcome
    assert state.balance(BUDGET) == (budget if outcome is EntryOutcome.BUDGET_EXHAUSTED else budget - 300)


def test_an_exhausted_budget_still_pays_volunteers_and_settles() -> None:
    state = after(deposit(300), credit(1), credit(2, price=0), post(2), post(1))
    assert state.balance(BUDGET) == 0
    assert state.balance(payable(node(1))) == 300


def test_deposits_stop_before_any_balance_could_overflow() -> None:
    before = after(deposit(DEPOSITS_MAX_MICROS - 1))
    assert applied(before, deposit(2, "wire-2")) == (before, EntryOutcome.DEPOSIT_LIMIT)
    assert after(deposit(DEPOSITS_MAX_MICROS - 1), deposit(1, "wire-2")).balance(OUTSIDE) == -DEPOSITS_MAX_MICROS


@pytest.mark.parametrize("entry", [version(1), root(1), owner_act(1), batch(1)], ids=lambda entry: entry.kind)
def test_what_is_only_noted_moves_nothing_and_means_one_thing(entry: Entry) -> None:
    before = after(deposit(1_000), entry)
    assert before.balances == after(deposit(1_000)).balances
    assert applied(before, entry) == (before, EntryOutcome.ALREADY_APPLIED)
    other: dict[str, Entry] = {
        "version": version(1, manifest="b"),
        "root": root(1, document="b"),
        "owner": owner_act(1, digest="f"),
        "payout_batch": batch(1, root="f"),
    }
    assert applied(before, other[entry.kind]) == (before, EntryOutcome.CONFLICT)


def test_balances_follow_a_payout() -> None:
    earned: list[Entry] = [credit(1), post(1), credit(2, of=2), post(2)]
    state = after(deposit(1_000), *earned, batch(1, micros=200), payout(1, micros=200), paid(1))
    assert state.balance(payable(node(1))) == 100
    assert (state.balance(paying(node(1))), state.balance(paid_to(node(1)))) == (0, 200)
    assert state.balance(payable(node(2))) == 300


def test_a_node_is_never_paid_more_than_it_is_owed() -> None:
    before = after(deposit(1_000), credit(1), post(1), credit(2), batch(1, micros=900))
    assert applied(before, payout(1, micros=301)) == (
        before,
        EntryOutcome.NOT_PAYABLE,
    )  # what is pending is not owed
    assert applied(before, payout(1, of=2)) == (before, EntryOutcome.NOT_PAYABLE)
    emptied = after(deposit(1_000), credit(1), post(1), batch(1), payout(1), batch(2))
    assert applied(emptied, payout(2)) == (emptied, EntryOutcome.NOT_PAYABLE)


def test_a_payout_repeated_with_another_amount_is_a_conflict_and_paid_by_another_reference_too_late() -> None:
    under_way = after(deposit(1_000), credit(1), post(1), batch(1, micros=200), payout(1, micros=200))
    assert applied(under_way, payout(1, micros=100)) == (under_way, EntryOutcome.CONFLICT)
    done = after(deposit(1_000), credit(1), post(1), batch(1, micros=200), payout(1, micros=200), paid(1))
    assert applied(done, paid(1, reference="tx-2")) == (done, EntryOutcome.ALREADY_PAID)


def test_money_moved_outside_of_a_published_batch_is_refused() -> None:
    before = after(*EARNED)
    assert applied(before, payout(1)) == (before, EntryOutcome.UNKNOWN_BATCH)
    other = after(*EARNED, batch(1))
    assert applied(other, payout(2)) == (other, EntryOutcome.UNKNOWN_BATCH)
    assert applied(before, paid(1)) == (before, EntryOutcome.UNKNOWN_PAYOUT)


def test_payouts_beyond_what_their_batch_says_are_refused() -> None:
    small = after(*EARNED, batch(1, micros=299))
    assert applied(small, payout(1)) == (small, EntryOutcome.BEYOND_BATCH)
    begun = after(*EARNED, batch(1, micros=500, payees=2), payout(1))
    assert applied(begun, payout(1, of=2, micros=201)) == (begun, EntryOutcome.BEYOND_BATCH)
    whole = after(*EARNED, batch(1, micros=500, payees=2), payout(1, micros=200), payout(1, of=2))
    assert whole.batches[1].is_whole
    more = after(*EARNED, batch(1), payout(1))
    assert applied(more, payout(1, of=2, micros=1)) == (more, EntryOutcome.BEYOND_BATCH), "a line more"


@pytest.mark.parametrize(
    ("payees", "micros", "outcome"),
    [
        (1, 300, EntryOutcome.APPLIED),  # all of it
        (2, 300, EntryOutcome.BEYOND_BATCH),  # nothing is left for the other payee
        (2, 299, EntryOutcome.APPLIED),
        (3, 299, EntryOutcome.BEYOND_BATCH),  # a micro is left for two others
        (3, 298, EntryOutcome.APPLIED),
    ],
)
def test_a_batch_pays_as_many_as_it_says(payees: int, micros: int, outcome: EntryOutcome) -> None:
    before = after(*EARNED, batch(1, payees=payees))
    assert applied(before, payout(1, micros=micros))[1] is outcome


def test_one_payees_many_nodes_are_as_many_lines_of_a_batch() -> None:
    """A batch counts owners; how many nodes an owner has is not in it."""
    assert after(*EARNED, batch(1, micros=600), payout(1), payout(1, of=2)).batches[1].is_whole


def test_nothing_of_a_batch_is_paid_before_all_of_it_is_in_the_book() -> None:
    begun = after(*EARNED, batch(1, micros=600, payees=2), payout(1))
    assert applied(begun, paid(1)) == (begun, EntryOutcome.BATCH_INCOMPLETE)
    whole, _ = applied(begun, payout(1, of=2))
    assert applied(whole, paid(1))[1] is EntryOutcome.APPLIED


def test_conservation_check_notices_payouts_that_no_batch_has() -> None:
    sound = after(*EARNED, batch(1, micros=600, payees=2), payout(1))
    for batches in ({}, {1: sound.batches[1]._replace(moved_micros=299)}, {2: sound.batches[1]}):
        with pytest.raises(BookBroken, match="batch"):
            book.check(sound._replace(batches=batches))


def test_conservation_check_notices_a_payout_whose_money_went_to_another_node() -> None:
    sound = after(*EARNED, batch(1, micros=600, payees=2), payout(1), payout(1, of=2))
    thief, victim = paying(node(1)), paying(node(2))
    moved = {**sound.balances, thief: sound.balance(thief) + 1, victim: sound.balance(victim) - 1}
    with pytest.raises(BookBroken, match="its claims sum to"):
        book.check(sound._replace(balances=moved))


def test_only_the_secret_that_was_committed_to_is_revealed_and_once() -> None:
    assert book.step(after(), reveal(1)) == (BookState(), EntryOutcome.NOT_COMMITTED)
    before = after(commitment(1), commitment(2, b"\1" * 32))
    assert applied(before, reveal(1, b"\1" * 32)) == (before, EntryOutcome.NOT_COMMITTED)
    assert applied(before, reveal(2)) == (before, EntryOutcome.NOT_COMMITTED)
    shown = after(commitment(1), reveal(1))
    assert applied(shown, reveal(1)) == (shown, EntryOutcome.ALREADY_APPLIED)
    assert applied(before, commitment(1, b"\2" * 32)) == (before, EntryOutcome.CONFLICT)


def test_a_granted_appeal_pays_what_was_voided_once_and_no_more() -> None:
    before = after(deposit(1_000), credit(1), credit(2), credit(3, of=2), void(1), void(2), void(3), *GRANTED)
    assert before.balance(BUDGET) == 1_000
    state, outcome = applied(before, reinstate(1))
    assert (outcome, state.balance(BUDGET), state.balance(payable(node(1)))) == (EntryOutcome.APPLIED, 700, 300)
    assert applied(state, reinstate(1)) == (state, EntryOutcome.ALREADY_POSTED)
    assert applied(state, void(1)) == (state, EntryOutcome.ALREADY_POSTED)
    window, outcome = applied(state, reinstate(2, by=1))
    assert (outcome, window.balance(payable(node(1)))) == (EntryOutcome.APPLIED, 600)


def test_nothing_is_reinstated_without_a_ruling_that_grants_it() -> None:
    void_only = after(deposit(1_000), credit(1), void(1))
    assert applied(void_only, reinstate(1)) == (void_only, EntryOutcome.NOT_GRANTED)
    asked = after(deposit(1_000), credit(1), void(1), appeal(1))
    assert applied(asked, reinstate(1)) == (asked, EntryOutcome.NOT_GRANTED)
    denied = after(deposit(1_000), credit(1), void(1), appeal(1), ruling(1, "denied"))
    assert applied(denied, reinstate(1)) == (denied, EntryOutcome.NOT_GRANTED)
    assert applied(denied, ruling(1)) == (denied, EntryOutcome.CONFLICT), "the first ruling stands"
    granted = after(deposit(1_000), credit(1), void(1), *GRANTED)
    other = reinstate(1, reason="another_reason")
    assert applied(granted, other) == (granted, EntryOutcome.NOT_GRANTED)
    assert applied(granted, reinstate(1, by=2)) == (granted, EntryOutcome.NOT_GRANTED)


def test_an_empty_budget_reinstates_nothing() -> None:
    before = after(deposit(300), credit(1), void(1), credit(2), *GRANTED)
    assert applied(before, reinstate(1)) == (before, EntryOutcome.BUDGET_EXHAUSTED)


def test_a_ruling_needs_an_appeal_and_an_appeal_is_made_once() -> None:
    assert book.step(after(), ruling(1)) == (BookState(), EntryOutcome.NOT_APPEALED)
    before = after(appeal(1))
    assert applied(before, appeal(1)) == (before, EntryOutcome.ALREADY_APPLIED)
    assert applied(before, appeal(1, digest="e")) == (before, EntryOutcome.CONFLICT)
    assert applied(before, ruling(2)) == (before, EntryOutcome.NOT_APPEALED)


def test_a_verdict_is_said_once_and_moves_nothing() -> None:
    before = after(deposit(1_000), credit(1))
    judged, outcome = applied(before, verdict(1))
    assert (outcome, judged.balances, judged.claims) == (EntryOutcome.APPLIED, before.balances, before.claims)
    other = verdict(1).model_copy(update={"outcome": "hard"})
    assert applied(judged, other) == (judged, EntryOutcome.CONFLICT)


def test_fold_goes_on_where_another_ended_and_leaves_that_as_it_was() -> None:
    before = after(deposit(1_000), credit(1))
    frozen = before._replace(balances=dict(before.balances), claims=dict(before.claims))
    state, refused = book.fold(enumerate([credit(1), post(1)]), before)
    assert (state, refused) == (after(deposit(1_000), credit(1), post(1)), {0: EntryOutcome.ALREADY_APPLIED})
    assert before == frozen


def test_fold_is_apply_repeated() -> None:
    entries: list[Entry] = [credit(9), deposit(1_000), credit(1), deposit(1_000), post(1), void(1), credit(2), void(2)]
    state, refused = book.fold(enumerate(entries))
    assert state == reduce(lambda seen, entry: applied(seen, entry)[0], entries, BookState())
    assert refused == {
        0: EntryOutcome.BUDGET_EXHAUSTED,
        3: EntryOutcome.ALREADY_APPLIED,
        5: EntryOutcome.ALREADY_POSTED,
    }


def test_step_reads_only_the_accounts_of_its_route() -> None:
    """The property that the store relies on when it reads a slice of the book."""
    whole = after(deposit(1_000), credit(1), credit(2, of=2))
    accounts = book.route(post(1), node(1))
    part = BookState({account: whole.balance(account) for account in accounts}, {claim(1): whole.claims[claim(1)]})
    assert book.step(part, post(1)) == book.step(whole, post(1))


def test_conservation_check_notices_a_micro_made_of_nothing() -> None:
    sound = after(deposit(1_000), credit(1))
    book.check(sound)
    for account in sound.balances:
        with pytest.raises(BookBroken):
            book.check(sound._replace(balances={**sound.balances, account: sound.balance(account) + 1}))


def test_conservation_check_notices_money_moved_between_nodes() -> None:
    sound = after(deposit(1_000), credit(1), credit(2, of=2))
    thief, victim = pending(node(1)), pending(node(2))
    moved = {**sound.balances, thief: sound.balance(thief) + 1, victim: sound.balance(victim) - 1}
    with pytest.raises(BookBroken, match="its claims sum to"):
        book.check(sound._replace(balances=moved))


def test_settling_from_a_damaged_pending_account_stops_the_program() -> None:
    sound = after(deposit(1_000), credit(1))
    with pytest.raises(BookBroken, match="would fall"):
        book.step(sound._replace(balances={**sound.balances, pending(node(1)): 299}), post(1))
