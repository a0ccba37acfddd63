"""The files of rails stripe and lightning: shell scripts that the operator reads and runs, which pay nobody twice.

- Each script is `stripe.sh` or `lightning.sh` beside this module, with one line for each payee. It may be run again at
  any time; its first lines say why.
- Values in a line are quoted for the shell, beside the checks of addresses.
"""

import shlex
from collections.abc import Sequence
from importlib import resources

from coordinator.config.rail_units import MSAT_PER_UNIT
from coordinator.transactions.rails.base import PaymentTerms
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
