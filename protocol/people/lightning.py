"""Lightning addresses at which an owner can be paid again and again: Lightning address, LNURL, and BOLT12 offer.

- A Lightning address `name@host` (LUD-16) and an LNURL (LUD-01, bech32) are https addresses of a service that returns
  invoices. Only public host names are accepted: the payer's machine fetches them.
- An offer (BOLT12) is a stream of TLV fields without a checksum, so its fields are checked, points on the curve
  included. It must let the payer choose the amount, and must not expire: it is paid in every batch. It is for Bitcoin's
  main chain, names no quantity, and is written in one piece.
- An invoice is refused: it can be paid once only.
"""

import re
from collections.abc import Iterator

from protocol import limits

_CHARACTERS = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_GENERATOR = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
"""The generator of bech32's checksum (BIP-173)."""

_HOST = r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAME_AT_HOST = re.compile(rf"([a-z0-9][a-z0-9._+-]*)@({_HOST})")
_URL = re.compile(rf"https://({_HOST})(?::[0-9]{{1,5}})?(?:[/?][!-~]*)?")

BITCOIN = bytes.fromhex("6fe28c0ab6f1b372c1a6a246ae63f74f931e8365e15a089c68d6190000000000")
"""The hash of the main chain's first block, as offers name a chain."""

_CHAINS, _METADATA, _CURRENCY, _AMOUNT, _DESCRIPTION, _FEATURES = 2, 4, 6, 8, 10, 12
_EXPIRY, _PATHS, _ISSUER, _QUANTITY, _ISSUER_ID = 14, 16, 18, 20, 22
_KNOWN = {_CHAINS, _METADATA, _DESCRIPTION, _FEATURES, _PATHS, _ISSUER, _ISSUER_ID}
_UNPAYABLE = {
    _CURRENCY: "has a fixed amount",
    _AMOUNT: "has a fixed amount",
    _EXPIRY: "expires",
    _QUANTITY: "asks for a quantity",
}
"""Fields of valid offers that a payout cannot fulfil."""

_FIELD_RANGES = (range(1, 80), range(1_000_000_000, 2_000_000_000))
_PRIME = 2**256 - 2**32 - 977
"""The prime of the field of secp256k1."""


def checked_lightning(where: str) -> None:
    """Raise `ValueError` unless this is a Lightning address, an LNURL or an offer that can be paid in every batch."""
    if "@" in where or where.lower().startswith("lnurl1"):
        lnurl_of(where)
    elif where.lower().startswith("lno1"):
        _check_offer(where)
    else:
        raise ValueError("a lightning: address is name@host, an LNURL (lnurl1…) or an offer (lno1…); not an invoice")


def is_offer(where: str) -> bool:
    return where.lower().startswith("lno1")


def lnurl_of(where: str) -> str:
    """Return the https address of a Lightning address or LNURL; raise `ValueError` if it is wrong."""
    if "@" in where:
        parts = _NAME_AT_HOST.fullmatch(where)
        if parts is None:
            raise ValueError("a Lightning address is name@host in small letters, with a public host name")
        url = f"https://{parts[2]}/.well-known/lnurlp/{parts[1]}"
    else:
        try:
            url = _decoded(where, "lnurl", checksum=True).decode("ascii")
        except UnicodeDecodeError:
            raise ValueError("this LNURL is not text") from None
    found = _URL.fullmatch(url)
    if found is None or found[1].endswith((".onion", ".localhost", ".local")):
        raise ValueError("this LNURL is not an https address with a public host name; onion services cannot be paid")
    return url


def _check_offer(where: str) -> None:
    """Raise `ValueError` unless the offer is well-formed and can be paid with any amount at any time."""
    if "+" in where or " " in where:
        raise ValueError("write the offer in one piece, without + and spaces")
    fields = dict(_fields(_decoded(where, "lno", checksum=False)))
    for kind, reason in _UNPAYABLE.items():
        if kind in fields:
            raise ValueError(f"this offer {reason}; create one for any amount, without expiry and quantity")
    if unknown := [kind for kind in fields if kind not in _KNOWN and kind % 2 == 0]:
        raise ValueError(f"this offer needs the unknown field {unknown[0]}")
    chains = fields.get(_CHAINS, BITCOIN)
    if not chains or len(chains) % 32 or BITCOIN not in {chains[i : i + 32] for i in range(0, len(chains), 32)}:
        raise ValueError("this offer is not for Bitcoin's main chain")
    if any(byte & 0x55 for byte in fields.get(_FEATURES, b"")):  # even bits must be understood
        raise ValueError("this offer needs unknown features")
    for kind in (_DESCRIPTION, _ISSUER):
        try:
            fields.get(kind, b"").decode()
        except UnicodeDecodeError:
            raise ValueError("a text of this offer is not UTF-8: it is mistyped") from None
    if _ISSUER_ID in fields:
        _check_point(fields[_ISSUER_ID])
    elif _PATHS not in fields:
        raise ValueError("this offer names nobody to pay")
    if _PATHS in fields:
        _check_paths(fields[_PATHS])


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of a TLV stream in rising order."""
    place, last = 0, 0
    if not data:
        raise ValueError("this offer is empty")
    while place < len(data):
        kind, place = _big_size(data, place)
        size, place = _big_size(data, place)
        if kind <= last or not any(kind in allowed for allowed in _FIELD_RANGES):
            raise ValueError(f"field {kind} does not belong there in an offer: it is mistyped")
        yield kind, _part(data, place, size)
        place, last = place + size, kind


def _big_size(data: bytes, place: int) -> tuple[int, int]:
    """Return a number in BOLT's BigSize form, and the place after it."""
    first = _part(data, place, 1)[0]
    size = {0xFD: 2, 0xFE: 4, 0xFF: 8}.get(first, 0)
    if not size:
        return first, place + 1
    value = int.from_bytes(_part(data, place + 1, size))
    if value < (0xFD if size == 2 else 1 << 4 * size):
        raise ValueError("a number of this offer is not in its shortest form")
    return value, place + 1 + size


def _check_paths(data: bytes) -> None:
    """Raise `ValueError` unless these are blinded paths with one hop or more each."""
    place = 0
    if not data:
        raise ValueError("a path of this offer is empty")
    while place < len(data):
        if _part(data, place, 1)[0] in (0, 1):  # a channel and its direction instead of a point
            place += len(_part(data, place, 9))
        else:
            place += _check_point(_part(data, place, 33))
        place += _check_point(_part(data, place, 33))
        hops, place = _part(data, place, 1)[0], place + 1
        if not hops:
            raise ValueError("a path of this offer is empty")
        for _ in range(hops):
            place += _check_point(_part(data, place, 33))
            size = int.from_bytes(_part(data, place, 2))
            place += 2 + len(_part(data, place + 2, size))


def _check_point(data: bytes) -> int:
    """Raise `ValueError` unless the bytes are a point of secp256k1; return their number."""
    x = int.from_bytes(data[1:])
    square = (pow(x, 3, _PRIME) + 7) % _PRIME
    if len(data) != 33 or data[0] not in (2, 3) or x >= _PRIME or pow(square, (_PRIME - 1) // 2, _PRIME) != 1:
        raise ValueError("a key of this offer is no point of the curve: it is mistyped")
    return len(data)


def _part(data: bytes, place: int, size: int) -> bytes:
    part = data[place : place + size]
    if len(part) != size:
        raise ValueError("this offer is cut off")
    return part


def _decoded(text: str, prefix: str, *, checksum: bool) -> bytes:
    """Return the bytes of a bech32 text with this prefix, whose checksum is correct if it has one."""
    low = text.lower()
    if text not in (low, text.upper()):
        raise ValueError("write it in small letters only or in capitals only")
    values = [_CHARACTERS.find(character) for character in low.removeprefix(prefix + "1")]
    if len(text) > limits.ADDRESS_MAX_CHARS or not low.startswith(prefix + "1") or -1 in values:
        raise ValueError(f"{prefix}1 and then only letters and digits of bech32 are expected")
    if checksum:
        high = [ord(character) >> 5 for character in prefix]
        if len(values) < 6 or _polymod([*high, 0, *(ord(character) & 31 for character in prefix), *values]) != 1:
            raise ValueError("the checksum is wrong: it is mistyped")
        values = values[:-6]
    spare = 5 * len(values) % 8
    bits = 0
    for value in values:
        bits = bits << 5 | value
    if spare >= 5 or bits & ((1 << spare) - 1):
        raise ValueError("its end is wrong: it is mistyped or cut off")
    return (bits >> spare).to_bytes(5 * len(values) // 8)


def _polymod(values: list[int]) -> int:
    check = 1
    for value in values:
        top = check >> 25
        check = (check & 0x1FFFFFF) << 5 ^ value
        for place, factor in enumerate(_GENERATOR):
            check ^= factor if top >> place & 1 else 0
    return check
