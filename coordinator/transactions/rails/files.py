"""The files of a batch for a bank, a payment service or a node's program.

- The same batch makes the same bytes. A file that exists with other bytes is never replaced: it may have been paid.
- A rail's module returns the bytes of its files by their suffixes.
"""

import csv
import io
import shlex
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from coordinator.base.files import write_durably
from coordinator.config.rail_units import MSAT_PER_UNIT
from coordinator.transactions.rails.base import PaymentTerms
from coordinator.transactions.rails.sepa import sepa_files
from protocol.errors import PayoutFailed
from protocol.people.lightning import is_offer, lnurl_of
from protocol.text.money import MICROS

BATCH, PAYMENTS = "@BATCH@", "@PAYMENTS@\n"
"""The places of a script that the batch's key and its payments replace."""


def stripe_files(terms: PaymentTerms) -> dict[str, bytes]:
    """Return the script that transfers a batch's amounts to connected accounts, by its suffix."""
    batch, currency = terms.batch, terms.unit.code.lower()
    lines = [
        ("transfer", batch.payment_id(place), str(terms.steps(payee)), currency, payee.address.removeprefix("stripe:"))
        for place, payee in enumerate(batch.payees)
    ]
    return {".stripe.sh": _script("stripe.sh", terms, lines)}


def lightning_files(terms: PaymentTerms) -> dict[str, bytes]:
    """Return the script that pays a batch by a Lightning node's command line, by its suffix."""
    batch, lines = terms.batch, []
    for place, payee in enumerate(batch.payees):
        where = payee.address.removeprefix("lightning:")
        msat = payee.amount_micros * MSAT_PER_UNIT[terms.unit.code] // MICROS
        kind, target = ("offer", where.lower()) if is_offer(where) else ("lnurl", lnurl_of(where))
        lines.append(("pay", kind, batch.payment_id(place), str(msat), target))
    return {".lightning.sh": _script("lightning.sh", terms, lines)}


def _script(name: str, terms: PaymentTerms, lines: Sequence[tuple[str, ...]]) -> bytes:
    text = resources.files(__package__).joinpath(name).read_text()
    calls = "".join(f"{shlex.join(line)}\n" for line in lines)
    return text.replace(BATCH, terms.batch.key.hex()).replace(PAYMENTS, calls).encode()


LINES_MAX = 5_000
"""PayPal's limit of payments in a file."""

CENT_MICROS = 10_000


def paypal_files(terms: PaymentTerms) -> dict[str, bytes]:
    """Return the bytes of the batch's files by their suffixes."""
    lines = [_line(terms, place) for place in range(len(terms.batch.payees))]
    parts = [lines[start : start + LINES_MAX] for start in range(0, len(lines), LINES_MAX)]
    return {f".paypal{f'-{number}' if number > 1 else ''}.csv": _csv(part) for number, part in enumerate(parts, 1)}


def _line(terms: PaymentTerms, place: int) -> tuple[str, ...]:
    payee = terms.batch.payees[place]
    steps = terms.steps(payee)
    if terms.unit.step_micros == CENT_MICROS:
        amount = f"{steps // 100}{terms.settings.paypal_decimal}{steps % 100:02}"
    else:
        amount = str(steps)
    note = f"Echo Swarm payout {terms.batch.number}"
    return payee.address.removeprefix("paypal:"), amount, terms.unit.code, terms.batch.payment_id(place), note, "PAYPAL"


def _csv(lines: list[tuple[str, ...]]) -> bytes:
    table = io.StringIO()
    csv.writer(table, lineterminator="\r\n").writerows(lines)
    return table.getvalue().encode()


_FILES: dict[str, Callable[[PaymentTerms], dict[str, bytes]]] = {
    "sepa": sepa_files,
    "paypal": paypal_files,
    "stripe": stripe_files,
    "lightning": lightning_files,
}


def write_files(rail: str, terms: PaymentTerms, folder: Path) -> list[Path]:
    """Write the files of a batch for its rail, once, and return their paths; none for other rails."""
    files = _FILES[rail](terms) if rail in _FILES else {}
    paths = {folder / f"batch-{terms.batch.number:06}{suffix}": data for suffix, data in files.items()}
    for path, data in paths.items():
        if path.exists() and path.read_bytes() != data:
            raise PayoutFailed(
                f"{path} exists with other content: it was edited, or settings of payouts or the software changed.",
                hint="If it was paid, run `payout settle` with its reference. Else move it away and run this again.",
            )
    for path, data in paths.items():
        write_durably(path, data)
    return list(paths)
