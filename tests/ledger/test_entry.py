"""Entries: one byte form, one hash, one effect; amounts in whole micros."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.entry import (
    CLAIM_MAX_TOKENS,
    DEPOSITS_MAX_MICROS,
    ENTRY_MAX_BYTES,
    KINDS,
    AppealEntry,
    Deposit,
    Entry,
    OwnerAct,
    Paid,
    Payout,
    Pending,
    Root,
    RulingEntry,
    Void,
    amount,
    parse,
    with_bonus,
)
from protocol import limits
from protocol.errors import MalformedMessage, MessageTooLarge, NotCanonical
from protocol.policy import chunks
from protocol.wire import canonical
from tests.ledger.values import (
    appeal,
    batch,
    claim,
    commitment,
    credit,
    deposit,
    formed,
    node,
    owner_act,
    paid,
    payout,
    post,
    reinstate,
    retraction,
    reveal,
    root,
    ruling,
    trained,
    verdict,
    version,
    void,
)

ONE_OF_EACH: list[Entry] = [
    deposit(5), credit(1), post(1), void(1), version(1), commitment(1), reveal(1), verdict(1),
    owner_act(1), batch(1), payout(1), paid(1), appeal(1), ruling(1), reinstate(2), root(1),
    formed(1), trained(1, "1", "2"), retraction(2, 1, 1, "1", "3"),
]  # fmt: skip
FROZEN = [
    "878dccd7aba10d07", "099233af4af10ae9", "1ac2de3b796d4f0d", "979a9776bd6549af", "1cee4de71266b15e",
    "fe10e1b9077c10ed", "9ac9f080e791e281", "bf88c207ae3887d9",
    "e6ffd26a736c23dd", "2d534566ccdd7faf", "8abe812476e84e46", "2a6397a54c890f59",
    "09f0c366bb41735b", "b12b86f54d047a32", "82fde744b36667ad", "f63d89d16ec57739",
    "a57d429056c3a674", "33fbd3afad496c07", "78eb049a63fe6d5c",
]  # fmt: skip


@pytest.mark.parametrize("entry", ONE_OF_EACH, ids=lambda entry: entry.kind)
def test_bytes_read_back(entry: Entry) -> None:
    assert parse(entry.to_bytes()) == entry


def test_every_kind_is_tested_here_and_named_as_its_model() -> None:
    assert {entry.kind: type(entry) for entry in ONE_OF_EACH} == KINDS


def test_hashes_are_frozen() -> None:
    """A changed hash is a changed encoding: every stored ledger would stop to verify."""
    assert [entry.content_hash[:16] for entry in ONE_OF_EACH] == FROZEN


def test_post_and_void_of_a_claim_are_one_effect() -> None:
    assert post(1).effect == void(1).effect == void(1, "stale").effect
    assert len({deposit(5).effect, credit(1).effect, post(1).effect, post(2).effect}) == 4


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", MalformedMessage),
        (canonical.encode([]), MalformedMessage),
        (canonical.encode({}), MalformedMessage),
        (canonical.encode({"kind": ["post"]}), MalformedMessage),
        (canonical.encode({"kind": "gift", "claim_id": claim(1)}), MalformedMessage),
        (canonical.encode({"kind": "post"}), MalformedMessage),
        (canonical.encode({"kind": "post", "claim_id": claim(1), "extra": 1}), MalformedMessage),
        (canonical.encode({"kind": "post", "claim_id": claim(1).upper() + "\n"}), MalformedMessage),
        (post(1).to_bytes() + b"\0", MalformedMessage),
        (b"\x82\xa4kind\xa4post\xa8claim_id\xd9\x40" + claim(1).encode(), NotCanonical),
        (bytes(ENTRY_MAX_BYTES + 1), MessageTooLarge),
    ],
)
def test_other_bytes_are_no_entry(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse(data)


def test_pending_with_an_invented_amount_is_refused() -> None:
    inflated = credit(1).model_dump() | {"amount_micros": credit(1).amount_micros + 1}
    with pytest.raises(MalformedMessage, match="tokens times price"):
        Pending.from_value(inflated)


@pytest.mark.parametrize(
    "change",
    [
        {"node_id": "somebody"},
        {"claim_id": "12"},
        {"tokens": 0, "amount_micros": 0},
        {"tokens": CLAIM_MAX_TOKENS + 1},
        {"tokens": True},
        {"price_micros_per_mtok": -1},
        {"price_micros_per_mtok": limits.PRICE_MAX_MICROS_PER_MTOK + 1},
    ],
    ids=str,
)
def test_pending_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        Pending.from_value(credit(1).model_dump() | change)


@pytest.mark.parametrize("amount_micros", [0, -1, DEPOSITS_MAX_MICROS + 1])
def test_deposit_out_of_bounds_is_refused(amount_micros: int) -> None:
    with pytest.raises(MalformedMessage):
        Deposit.from_value({"kind": "deposit", "reference": "wire-1", "amount_micros": amount_micros})


@pytest.mark.parametrize("change", [{"outcome": "perhaps"}, {"reason_code": "Because I say so"}, {"claim_id": "12"}])
def test_ruling_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        RulingEntry.from_value(ruling(1).model_dump() | change)


def test_a_reinstatement_names_the_ruling_that_it_follows_from() -> None:
    assert reinstate(2, by=1).ruling == ruling(1)
    assert reinstate(2, by=1).effect != reinstate(1, by=1).effect
    assert ruling(1).appealed == appeal(1).effect


@pytest.mark.parametrize("reason", ["", "Because", "two words", "x" * 65, "_x"])
def test_void_needs_a_reason_code(reason: str) -> None:
    with pytest.raises(MalformedMessage):
        Void.from_value({"kind": "void", "claim_id": claim(1), "reason_code": reason})


@pytest.mark.parametrize(
    ("tokens", "price", "micros"),
    [
        (0, 10, 0),
        (1, 0, 0),
        (1, 999_999, 0),  # below one micro: rounded down, never up
        (1, 1_000_000, 1),
        (999_999, 1, 0),
        (1_000_001, 1, 1),
        (3, 1_500_000, 4),
        (CLAIM_MAX_TOKENS, limits.PRICE_MAX_MICROS_PER_MTOK, 2_097_152_000_000),
    ],
)
def test_amount(tokens: int, price: int, micros: int) -> None:
    assert amount(tokens, price) == micros


@pytest.mark.parametrize(
    ("price", "share", "raised"),
    [
        (10, 0.0, 10),
        (0, 1.0, 0),
        (19, 0.05, 19),  # less than a micro: rounded down
        (20, 0.05, 21),
        (1_000_000, 0.29, 1_290_000),
        (limits.PRICE_MAX_MICROS_PER_MTOK, 1.0, limits.PRICE_MAX_MICROS_PER_MTOK),  # a price that entries allow
    ],
)
def test_a_bonus_raises_the_price(price: int, share: float, raised: int) -> None:
    assert with_bonus(price, share) == raised


@pytest.mark.parametrize(
    ("entry", "change"),
    [
        (owner_act(1), {"number": 0}),
        (owner_act(1), {"number": limits.STATEMENT_NUMBER_MAX + 1}),
        (owner_act(1), {"act": "gift"}),
        (owner_act(1), {"owner": "somebody"}),
        (payout(1), {"amount_micros": 0}),
        (payout(1), {"amount_micros": -300}),
        (payout(1), {"batch": 0}),
        (paid(1), {"reference": ""}),
        (paid(1), {"reference": "two words"}),
        (batch(1), {"payees": 0}),
        (batch(1), {"payees_root": "e"}),
    ],
    ids=str,
)
def test_entries_about_owners_and_payouts_out_of_bounds_are_refused(entry: Entry, change: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        type(entry).from_value(entry.model_dump() | change)


def test_no_claim_can_have_the_name_of_a_payout() -> None:
    """Claims and payouts share a table: a claim's name is 64 hex digits."""
    assert payout(1).claim_id == paid(1).claim_id == f"1:{node(1)}"
    assert len(payout(10**9).claim_id) <= 64
    with pytest.raises(MalformedMessage):
        Pending.from_value(credit(1).model_dump() | {"claim_id": payout(1).claim_id})


def test_the_largest_product_fits_into_63_bits() -> None:
    assert CLAIM_MAX_TOKENS * limits.PRICE_MAX_MICROS_PER_MTOK < 2**63


@pytest.mark.parametrize(
    ("tokens", "price"),
    [(-1, 1), (CLAIM_MAX_TOKENS + 1, 1), (1, -1), (1, limits.PRICE_MAX_MICROS_PER_MTOK + 1)],
)
def test_amount_out_of_bounds_is_refused(tokens: int, price: int) -> None:
    with pytest.raises(ValueError, match="not"):
        amount(tokens, price)


@given(
    parts=st.lists(st.integers(0, 10_000), min_size=1, max_size=20),
    price=st.integers(0, limits.PRICE_MAX_MICROS_PER_MTOK),
)
def test_splitting_work_into_claims_never_pays_more(parts: list[int], price: int) -> None:
    assert sum(amount(tokens, price) for tokens in parts) <= amount(sum(parts), price)


@pytest.mark.parametrize(
    "change",
    [{"version": 0}, {"version": limits.VERSION_MAX + 1}, {"version": True}, {"root_digest": "c"}, {"root": "{}"}],
    ids=str,
)
def test_root_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        Root.from_value(root(1).model_dump() | change)


def test_a_root_is_named_by_the_bytes_that_are_served() -> None:
    served = b'{"signed": {}}'
    assert Root.from_document(3, served) == Root(version=3, root_digest=chunks.digest(served))
    assert Root.from_document(3, served + b"\n") != Root.from_document(3, served)
    assert root(3).effect == "root:3"


def test_entries_name_only_what_may_be_public() -> None:
    assert set(credit(1).model_dump()) == {
        "kind", "claim_id", "lease_id", "node_id", "tokens", "price_micros_per_mtok", "amount_micros",
    }  # fmt: skip
    assert credit(1).node_id == node(1)
    assert set(OwnerAct.model_fields) == {"kind", "owner", "number", "act", "node_id", "statement_digest"}
    assert set(Root.model_fields) == {"kind", "version", "root_digest"}
    assert set(Payout.model_fields) == {"kind", "batch", "node_id", "amount_micros"}
    assert set(AppealEntry.model_fields) == {"kind", "claim_id", "statement_digest"}
    assert set(RulingEntry.model_fields) == {"kind", "claim_id", "outcome", "reason_code"}
    assert set(Paid.model_fields) == {"kind", "batch", "node_id", "reference"}
