"""Owners' statements: who said it, in one form, to places where somebody could be paid."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol import limits
from protocol.errors import BadSignature, MalformedMessage, MessageTooLarge, SwarmError
from protocol.people.owner import (
    Delegation,
    Earnings,
    NodeEarnings,
    PayoutAddress,
    Revocation,
    Statement,
    StatementReply,
    open_statement,
    payee_bytes,
    seal_statement,
)
from protocol.people.payout_addresses import checksummed
from protocol.wire import canonical
from protocol.wire.signing import Envelope, NodeKey

OWNER, NODE = NodeKey(b"o" * 32), NodeKey(b"n" * 32).node_id
ROUND = "a" * 64
ALL: list[Statement] = [
    Delegation(node_id=NODE, number=1),
    Revocation(node_id=NODE, number=2),
    PayoutAddress(round_id=ROUND, address="text:IBAN DE00", number=3),
]

EIP_55 = [
    "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed",
    "0xfB6916095ca1df60bB79Ce92cE3Ea74c37c5d359",
    "0xdbF03B407c01E7cD3CBea99509d93f8DDDC8C6FB",
    "0xD1220A0cf47c7B9Be7A2E6BA89F429762e7b9aDb",
]
"""The examples of the standard's own text."""


@pytest.mark.parametrize("said", ALL, ids=lambda said: said.kind)
def test_a_statement_reads_back_with_who_signed_it(said: Statement) -> None:
    assert open_statement(seal_statement(OWNER, said)) == (OWNER.node_id, said)


def test_statement_of_another_domain_is_refused() -> None:
    """A node that signs requests cannot be made to sign an address by accident."""
    request = OWNER.seal("request", ALL[0].to_bytes())
    with pytest.raises(BadSignature):
        open_statement(request)


def test_statement_altered_after_signing_is_refused() -> None:
    envelope = Envelope.from_bytes(seal_statement(OWNER, ALL[2]))
    other = ALL[2].model_copy(update={"address": "text:mine"}).to_bytes()
    with pytest.raises(BadSignature):
        open_statement(envelope.model_copy(update={"payload": other}).to_bytes())


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"kind": "gift"},
        {"kind": ["delegation"]},
        {"kind": "delegation", "node_id": NODE},
        {"kind": "delegation", "node_id": "somebody", "number": 1},
        {"kind": "delegation", "node_id": NODE, "number": 0},
        {"kind": "delegation", "node_id": NODE, "number": limits.STATEMENT_NUMBER_MAX + 1},
        {"kind": "address", "round_id": "a", "address": "text:x", "number": 1},
    ],
    ids=str,
)
def test_other_values_are_no_statement(value: canonical.Value) -> None:
    with pytest.raises(MalformedMessage):
        open_statement(OWNER.seal("owner", canonical.encode(value)))


def test_a_huge_statement_is_refused_before_it_is_read() -> None:
    with pytest.raises(MessageTooLarge):
        open_statement(bytes(limits.STATEMENT_MAX_BYTES + 1))


@given(st.binary(max_size=200))
def test_noise_is_no_statement(noise: bytes) -> None:
    with pytest.raises(SwarmError):
        open_statement(noise)


@pytest.mark.parametrize("account", EIP_55)
def test_capitals_are_those_of_the_standard(account: str) -> None:
    assert checksummed(account.lower()) == account
    assert payee_bytes(f"evm:{account}") == bytes.fromhex(account[2:])


@pytest.mark.parametrize("account", EIP_55)
@given(place=st.integers(2, 41), digit=st.sampled_from("0123456789abcdefABCDEF"))
def test_evm_address_with_one_digit_mistyped_is_refused(account: str, place: int, digit: str) -> None:
    typed = account[:place] + digit + account[place + 1 :]
    if typed != account and checksummed(typed) != typed:  # one in thousands has a sound checksum, too
        with pytest.raises(ValidationError):
            PayoutAddress(round_id=ROUND, address=f"evm:{typed}", number=1)


@pytest.mark.parametrize(
    "address",
    ["", "text:", "text: x", "text:x ", "text:a\nb", "text:ä", "evm:", "evm:0x12", "evm:" + "5" * 40, "sepa:DE00",
     "=text:x", "text:" + "x" * limits.ADDRESS_MAX_CHARS],
)  # fmt: skip
def test_what_nobody_could_be_paid_at_is_refused(address: str) -> None:
    with pytest.raises(ValidationError):
        PayoutAddress(round_id=ROUND, address=address, number=1)


@pytest.mark.parametrize("moment_ms", [-1, limits.MOMENT_MAX_MS + 1, 2**63, 2**64 - 1])
def test_a_moment_that_no_calendar_has_is_refused(moment_ms: int) -> None:
    """A time that an owner is told is written as a date, so it must be one."""
    amounts = dict.fromkeys(("pending_micros", "payable_micros", "paying_micros", "paid_micros"), 0)
    total = NodeEarnings(node_id=OWNER.node_id, name="", revoked=False, **amounts)
    earned = {"owner": OWNER.node_id, "nodes": (), "total": total.model_dump(), "address": "", "next_address": "x"}
    with pytest.raises(MalformedMessage, match="next_from_ms"):
        Earnings.from_value({**earned, "next_from_ms": moment_ms})
    with pytest.raises(MalformedMessage, match="counts_from_ms"):
        StatementReply.from_value({"outcome": "recorded", "counts_from_ms": moment_ms})


def test_the_last_moment_that_may_be_told_is_a_date() -> None:
    assert datetime.fromtimestamp(limits.MOMENT_MAX_MS / 1000, UTC).year == 9999
