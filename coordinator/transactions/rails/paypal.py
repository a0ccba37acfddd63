"""The files of rail paypal: a batch as CSV for PayPal's Payouts on the web, 5,000 payments in each file.

- A line is: e-mail address, amount, currency, the payment's id, a note to the payee, the wallet.
- PayPal shows the id to the operator and does not refuse a second file with it. So the operator uploads each file once.
"""

import csv
import io

from coordinator.transactions.rails.base import PaymentTerms

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
