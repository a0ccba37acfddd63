"""Payout addresses: the published examples of each standard, and what is mistyped or could not be paid."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.people.lightning import lnurl_of
from protocol.people.payout_addresses import EXAMPLES, IBAN_CHARS, check_iban, checked_address

IBANS = [
    "AT611904300234573201",
    "BE68539007547034",
    "CH9300762011623852957",
    "DE89370400440532013000",
    "FR1420041010050500013M02606",
    "GB29NWBK60161331926819",
    "MT84MALT011000012345MTLCAST001S",
    "NO9386011117947",
    "SE4550000000058398257466",
]
"""Examples of the registry of IBANs (ISO 13616)."""

LNURL = (
    "LNURL1DP68GURN8GHJ7UM9WFMXJCM99E3K7MF0V9CXJ0M385EKVCENXC6R2C35XVUKXEFCV5MKVV34X5EKZD3EV56NYD3HXQURZEPEXEJXXEPNXSCRV"
    "WFNV9NXZCN9XQ6XYEFHVGCXXCMYXYMNSERXFQ5FNS"
)
"""The example of LUD-01."""

VECTORS = json.loads(Path(__file__).with_name("bolt12_offers.json").read_text())
"""The offers of BOLT12's test vectors (lightning/bolts, bolt12/offers-test.json, CC-BY 4.0) by their descriptions."""

NOT_PAYABLE = {
    "for testnet": "main chain",
    "with amount": "fixed amount",
    "with currency": "fixed amount",
    "with expiry": "expires",
    "with quantity": "quantity",
    "with unlimited (or unknown) quantity": "quantity",
    "with single quantity (weird but valid)": "quantity",
}
"""Valid offers that a payout cannot fulfil, and the reason that their owner reads."""

OFFERS = {name: row["offer"] for name, row in VECTORS.items() if row["valid"] and name not in NOT_PAYABLE}
MALFORMED = {name: row["offer"] for name, row in VECTORS.items() if not row["valid"]}
MINIMAL = OFFERS["Minimal bolt12 offer"]


@pytest.mark.parametrize("address", EXAMPLES.values())
def test_examples_of_hints_are_valid(address: str) -> None:
    assert checked_address(address) == address


@pytest.mark.parametrize("iban", IBANS)
def test_iban_of_the_registry_is_accepted(iban: str) -> None:
    check_iban(iban)


@given(st.sampled_from(IBANS), st.integers(0, 40), st.sampled_from("0123456789ABCXYZ"))
def test_iban_with_one_sign_mistyped_is_refused(iban: str, place: int, sign: str) -> None:
    place %= len(iban)
    typed = iban[:place] + sign + iban[place + 1 :]
    if sign.isdigit() == iban[place].isdigit() and typed != iban:
        with pytest.raises(ValueError, match=r"."):
            check_iban(typed)


@given(st.sampled_from(IBANS), st.data())
def test_iban_with_two_neighbours_exchanged_is_refused(iban: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(4, len(iban) - 2))
    typed = iban[:place] + iban[place + 1] + iban[place] + iban[place + 2 :]
    if typed != iban:
        with pytest.raises(ValueError, match="check digits"):
            check_iban(typed)


@given(st.sampled_from(sorted(IBAN_CHARS)), st.text("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", min_size=30, max_size=30))
def test_check_digits_are_those_of_iso_7064(country: str, account: str) -> None:
    account = account[: IBAN_CHARS[country] - 4]
    digits = "".join(str(int(sign, 36)) for sign in account + country + "00")
    check_iban(f"{country}{98 - int(digits) % 97:02}{account}")


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("DE89370400440532013000", "IBAN/name"),
        ("DE89 3704 0044 0532 0130 00/Erika", "without spaces"),
        ("de89370400440532013000/Erika", "capitals"),
        ("US89370400440532013000/Erika", "not a country of SEPA"),
        ("DE8937040044053201300/Erika", "has 22 characters"),
        ("DE89370400440532013001/Erika", "mistyped"),
        ("DE89370400440532013000/", "70 characters"),
        ("DE89370400440532013000/Erika <b>", "70 characters"),
        ("DE89370400440532013000/=1+1", "70 characters"),
        ("DE89370400440532013000/A & B", "70 characters"),
        ("DE89370400440532013000/Jürgen", "write ue"),
        ("DE89370400440532013000/" + "x" * 71, "70 characters"),
    ],
)
def test_wrong_sepa_address_is_refused_with_the_reason(where: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        checked_address(f"sepa:{where}")


@pytest.mark.parametrize(
    "address",
    [
        "paypal:", "paypal:erika", "paypal:=1+1@example.org", "paypal:a,b@example.org", 'paypal:"a"@example.org',
        "paypal:-a@example.org", "paypal:a@example", "paypal:a@example.org\n", "paypal:" + "a" * 120 + "@example.org",
        "stripe:", "stripe:acct_", "stripe:cus_1032D82eZvKYlo2C", "stripe:acct_1032D82eZvKYlo2C$(x)", "bank:x", "erika",
    ],
)  # fmt: skip
def test_wrong_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        checked_address(address)


def test_lnurl_of_the_standard_is_the_address_of_its_service() -> None:
    service = "https://service.com/api?q=3fc3645b439ce8e7f2553a69e5267081d96dcd340693afabe04be7b0ccd178df"
    assert lnurl_of(LNURL) == lnurl_of(LNURL.lower()) == service
    assert lnurl_of("satoshi@bitcoin.org") == "https://bitcoin.org/.well-known/lnurlp/satoshi"


@given(st.integers(6, len(LNURL) - 1), st.sampled_from("QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L"))
def test_lnurl_with_one_sign_mistyped_is_refused(place: int, sign: str) -> None:
    typed = LNURL[:place] + sign + LNURL[place + 1 :]
    if typed != LNURL:
        with pytest.raises(ValueError, match="checksum"):
            checked_address(f"lightning:{typed}")


@pytest.mark.parametrize(
    "where",
    [
        "", "lnurl1", "Erika@example.org", "erika@localhost", "erika@127.0.0.1", "erika@[::1]", "erika@example.onion",
        "erika@example.org:80", "er'ika@example.org", "erika@printer.local", LNURL[:20] + LNURL[20:].lower(),
        "lnbc2500u1pvjluezpp5qqqsyqcyq5rqwzqfqqqsyqcyq5rqwzqfqqqsyqcyq5rqwzqfqypq",
    ],
)  # fmt: skip
def test_lightning_address_that_nobody_could_pay_is_refused(where: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        checked_address(f"lightning:{where}")


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
def test_valid_offer_is_accepted_in_both_cases(offer: str) -> None:
    checked_address(f"lightning:{offer}")
    checked_address(f"lightning:{offer.upper()}")


@pytest.mark.parametrize(("name", "reason"), NOT_PAYABLE.items(), ids=NOT_PAYABLE)
def test_offer_that_a_payout_cannot_fulfil_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        checked_address(f"lightning:{VECTORS[name]['offer']}")


@pytest.mark.parametrize("offer", MALFORMED.values(), ids=MALFORMED)
def test_malformed_offer_is_refused(offer: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        checked_address(f"lightning:{offer}")


def test_offer_in_pieces_is_refused() -> None:
    """Valid in the standard; but one offer has one form here, so that it can be compared."""
    with pytest.raises(ValueError, match="one piece"):
        checked_address(f"lightning:{MINIMAL[:30]}+{MINIMAL[30:]}")


@given(st.integers(0, len(MINIMAL) - 1))
def test_offer_that_is_cut_off_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        checked_address(f"lightning:{MINIMAL[:length]}")


@given(st.text(st.characters(codec="utf-8"), max_size=80), st.sampled_from(sorted(EXAMPLES)))
def test_noise_is_an_address_only_in_printable_ascii(noise: str, scheme: str) -> None:
    try:
        checked_address(f"{scheme}:{noise}")
    except ValueError:
        return
    assert noise.isascii()
    assert noise.isprintable()


def test_an_address_has_a_limit() -> None:
    with pytest.raises(ValueError, match="600"):
        checked_address("text:" + "x" * limits.ADDRESS_MAX_CHARS)
