"""Gifts: money that others than the operator gave to the round's budget, as deposits of the ledger.

- A gift is a deposit whose reference begins with `gift/`: its number, and a digest of who gave it. So anybody can add
  up the gifts in the log, and a reader of an older version still verifies it.
- Who gave it is in the giver's words, kept beside the ledger and shown on the page. The digest has a salt, so nobody
  can guess it, and a giver who knows both can prove the gift. The words can be erased; the entry stays.
- The reference of the payment makes a retry harmless: the same payment is recorded once.
"""

import json
import secrets
from typing import Any, NamedTuple

import sqlalchemy as sa

from coordinator.store.tables import gifts
from ledger import store
from ledger.book import EntryOutcome
from ledger.entry import DEPOSITS_MAX_MICROS, GIFT, Deposit
from ledger.tables import entries_table
from protocol.errors import ConfigInvalid, NotFound
from protocol.policy import chunks
from protocol.text.plain import visible

GIVER_MAX_CHARS = 80
REFERENCE_MAX_CHARS = 100
SALT_BYTES = 16

SHOWN = 5
"""Gifts that the status and the front page name."""


class RecordedGift(NamedTuple):
    """The outcome of recording a gift; `is_new` is False if the same payment was recorded before."""

    number: int
    entry_reference: str
    is_new: bool


def record(
    connection: sa.Connection, given_by: str, amount_micros: int, reference: str, *, now_ms: int
) -> RecordedGift:
    """Record a gift, and raise the budget by it; nothing changes if its payment was recorded before."""
    _require_valid(given_by, amount_micros, reference)
    known = connection.execute(sa.select(gifts).where(gifts.c.reference == reference)).one_or_none()
    if known is not None:
        if known.amount_micros != amount_micros:
            raise ConfigInvalid(
                f"The payment {reference} is recorded as gift {known.number} with another amount.",
                hint="Give each payment its own --reference.",
            )
        return RecordedGift(known.number, _recorded_reference(connection, known.number), False)
    number = 1 + (connection.execute(sa.select(sa.func.max(gifts.c.number))).scalar() or 0)
    salt = secrets.token_hex(SALT_BYTES)
    entry_reference = _entry_reference(number, given_by, salt)
    outcome = store.append(connection, Deposit(reference=entry_reference, amount_micros=amount_micros), now_ms)
    if outcome is not EntryOutcome.APPLIED:
        raise ConfigInvalid(f"The ledger refuses this gift: {outcome.value}.")
    row: dict[str, Any] = {"number": number, "given_by": given_by, "salt": salt, "reference": reference}
    connection.execute(sa.insert(gifts).values(**row, amount_micros=amount_micros, recorded_ms=now_ms))
    return RecordedGift(number, entry_reference, True)


def forget_giver(connection: sa.Connection, number: int) -> None:
    """Erase who gave a gift; the ledger keeps the amount and the digest, which nobody can guess."""
    erased = sa.update(gifts).where(gifts.c.number == number).values(given_by="", salt="")
    if not connection.execute(erased).rowcount:
        raise NotFound(f"There is no gift {number}.", hint="See `swarm-coordinator gifts list`.")


def list_gifts(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return all gifts, the oldest first."""
    return [dict(row) for row in connection.execute(sa.select(gifts).order_by(gifts.c.number)).mappings()]


def summary(connection: sa.Connection) -> dict[str, Any]:
    """Return the number and the sum of all gifts, and who gave the newest; payments stay private."""
    total = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(gifts.c.amount_micros), 0))
    count, micros = connection.execute(total).one()
    shown = sa.select(gifts.c.number, gifts.c.given_by, gifts.c.amount_micros)
    newest = connection.execute(shown.order_by(gifts.c.number.desc()).limit(SHOWN)).mappings()
    return {"count": count, "micros": int(micros), "newest": [dict(row) for row in newest]}


def _recorded_reference(connection: sa.Connection, number: int) -> str:
    """Return the reference of a recorded gift's deposit; its giver may be erased."""
    effect = entries_table.c.effect
    found = sa.select(effect).where(effect.startswith(f"deposit:{GIFT}{number}/"))
    return str(connection.execute(found).scalar_one()).removeprefix("deposit:")


def _entry_reference(number: int, given_by: str, salt: str) -> str:
    """Return the reference of a gift's deposit."""
    return f"{GIFT}{number}/{chunks.digest(json.dumps([number, given_by, salt]).encode())}"


def _require_valid(given_by: str, amount_micros: int, reference: str) -> None:
    if not given_by or visible(given_by, GIVER_MAX_CHARS) != given_by:
        raise ConfigInvalid(f"Who gave it is one line of 1 to {GIVER_MAX_CHARS} visible characters.")
    if not 0 < amount_micros <= DEPOSITS_MAX_MICROS:
        raise ConfigInvalid("A gift is more than 0 of the round's unit.")
    if not reference or len(reference) > REFERENCE_MAX_CHARS or not reference.isprintable():
        raise ConfigInvalid(
            f"The reference of the payment has 1 to {REFERENCE_MAX_CHARS} printable characters.",
            hint="Use the number of the bank's booking: a retry with the same one records nothing twice.",
        )
