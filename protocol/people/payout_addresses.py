"""Payout addresses, `scheme:where`: one check for each scheme, for the owner who types it and the round that pays.

| scheme | where | for |
|---|---|---|
| `evm:` | 0x and 40 hex digits, whose capitals are the checksum (EIP-55) | rail evm |
| `sepa:` | IBAN/name: an IBAN without spaces; 1 to 70 letters, digits, spaces and ?:().,'+- | rail sepa |
| `paypal:` | the e-mail address of a PayPal account, 127 characters at most | rail paypal |
| `stripe:` | the id of an account that is connected to the operator's (acct_…) | rail stripe |
| `lightning:` | name@host, an LNURL or a BOLT12 offer (`protocol.people.lightning`) | rail lightning |
| `text:` | for a person who pays by hand; no spaces around it | rail manual |

- An address has at most 600 characters, each printable ASCII. Only `text:` can carry markup, or anything that begins
  with a sign that a spreadsheet reads as a formula.
"""

import re
from collections.abc import Callable

from protocol import limits
from protocol.people.lightning import checked_lightning

EXAMPLES = {
    "evm": "evm:0x52908400098527886E0F7030069857D2E4169EE7",
    "sepa": "sepa:DE89370400440532013000/Erika Mustermann",
    "paypal": "paypal:erika@example.org",
    "stripe": "stripe:acct_1032D82eZvKYlo2C",
    "lightning": "lightning:erika@example.org",
    "text": "text:pay me by hand, see my letter",
}
"""An example for each scheme, for hints."""

IBAN_CHARS = {
    "AD": 24, "AL": 28, "AT": 20, "BE": 16, "BG": 22, "CH": 21, "CY": 28, "CZ": 24, "DE": 22, "DK": 18, "EE": 20,
    "ES": 24, "FI": 18, "FR": 27, "GB": 22, "GI": 23, "GR": 27, "HR": 21, "HU": 28, "IE": 22, "IS": 26, "IT": 27,
    "LI": 21, "LT": 20, "LU": 20, "LV": 21, "MC": 27, "MD": 24, "ME": 22, "MK": 19, "MT": 31, "NL": 18, "NO": 15,
    "PL": 28, "PT": 25, "RO": 24, "RS": 22, "SE": 24, "SI": 19, "SK": 24, "SM": 27, "VA": 22,
}  # fmt: skip
"""The length of an IBAN in each country of SEPA."""

_IBAN = re.compile(r"[A-Z]{2}[0-9]{2}[A-Z0-9]+")
_HOLDER = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9?:().,'+ -]{0,68}[A-Za-z0-9.)])?")
"""The characters that every bank of SEPA accepts in a name, at most 70; not the slash, which separates it."""

_EMAIL = re.compile(
    r"[A-Za-z0-9](?:[A-Za-z0-9._+-]{0,63})@(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,63}"
)
EMAIL_MAX_CHARS = 127
"""PayPal's limit."""

_STRIPE = re.compile(r"acct_[A-Za-z0-9]{8,64}")
_EVM = re.compile(r"0x[0-9a-fA-F]{40}")
_TEXT = re.compile(r"[!-~](?:[ -~]*[!-~])?")


def checked_address(address: str) -> str:
    """Return the address if it has a valid form, else raise `ValueError`."""
    scheme, _, where = address.partition(":")
    if scheme not in _CHECKS:
        known = ", ".join(f"{name}:" for name in _CHECKS)
        raise ValueError(f"an address begins with one of {known} as the round requires")
    if len(address) > limits.ADDRESS_MAX_CHARS:
        raise ValueError(f"an address has {limits.ADDRESS_MAX_CHARS} characters at most")
    _CHECKS[scheme](where)
    return address


def checksummed(account: str) -> str:
    """Return an EVM account with the capitals of its EIP-55 checksum."""
    from Crypto.Hash import keccak  # settings are read on machines without it

    digits = account.removeprefix("0x").lower()
    digest = keccak.new(digest_bits=256, data=digits.encode()).hexdigest()
    return "0x" + "".join(
        digit.upper() if int(sign, 16) >= 8 else digit for digit, sign in zip(digits, digest, strict=False)
    )


def check_iban(iban: str) -> None:
    """Raise `ValueError` unless this is an IBAN of a SEPA country, without spaces, with its check digits."""
    if not _IBAN.fullmatch(iban):
        raise ValueError("an IBAN is written in capitals and digits without spaces, such as DE89370400440532013000")
    if iban[:2] not in IBAN_CHARS:
        raise ValueError(f"{iban[:2]} is not a country of SEPA")
    if len(iban) != IBAN_CHARS[iban[:2]]:
        raise ValueError(f"an IBAN of {iban[:2]} has {IBAN_CHARS[iban[:2]]} characters, and this one has {len(iban)}")
    if not 2 <= int(iban[2:4]) <= 98 or int("".join(str(int(sign, 36)) for sign in iban[4:] + iban[:4])) % 97 != 1:
        raise ValueError("the check digits of this IBAN are wrong: it is mistyped")


def check_holder(name: str) -> None:
    """Raise `ValueError` unless every bank of SEPA accepts this name."""
    if not _HOLDER.fullmatch(name):
        raise ValueError(
            "a name has at most 70 characters: letters without accents (write ue for ü), digits, spaces and ?:().,'+-"
        )


def _check_sepa(where: str) -> None:
    iban, slash, name = where.partition("/")
    if not slash:
        raise ValueError("a sepa: address is IBAN/name, such as DE89370400440532013000/Erika Mustermann")
    check_iban(iban)
    check_holder(name)


def _check_evm(where: str) -> None:
    if not _EVM.fullmatch(where):
        raise ValueError("an evm: address is 0x and 40 hex digits")
    if where != checksummed(where):
        raise ValueError("the capitals of this evm: address are not its checksum (EIP-55): it is mistyped")


def _check_paypal(where: str) -> None:
    if len(where) > EMAIL_MAX_CHARS or not _EMAIL.fullmatch(where):
        raise ValueError("a paypal: address is the e-mail address of a PayPal account, such as erika@example.org")


def _check_stripe(where: str) -> None:
    if not _STRIPE.fullmatch(where):
        raise ValueError("a stripe: address is the id of an account connected to the operator's, acct_ and letters")


def _check_text(where: str) -> None:
    if not _TEXT.fullmatch(where):
        raise ValueError("a text: address is printable ASCII without spaces around it")


_CHECKS: dict[str, Callable[[str], None]] = {
    "evm": _check_evm,
    "sepa": _check_sepa,
    "paypal": _check_paypal,
    "stripe": _check_stripe,
    "lightning": checked_lightning,
    "text": _check_text,
}
