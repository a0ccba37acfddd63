"""The files of a batch that a person pays: for a bank, for PayPal, and scripts for Stripe and a Lightning node.

- The same batch makes the same bytes. A file that exists with other bytes is never replaced: it may have been paid.
- sepa: SEPA credit transfers, in the XML that banks take (ISO 20022 pain.001.001.09). MsgId and EndToEndId come from
  the batch's key: a bank refuses a file whose MsgId it has seen. Banks find a payee's bank by the IBAN, so no BIC is
  needed. The day of execution is the day on which the batch was made: a bank moves it to the next business day.
- paypal: CSV for PayPal's Payouts on the web, 5,000 payments in each file. A line is: e-mail address, amount, currency,
  the payment's id, a note to the payee, the wallet. PayPal shows the id to the operator and does not refuse a second
  file with it. So the operator uploads each file once.
- stripe and lightning: shell scripts that the operator reads and runs, which pay nobody twice. Each is `stripe.sh` or
  `lightning.sh` beside this module, with one line for each payee. It may be run again at any time; its first lines say
  why. Values in a line are quoted for the shell, beside the checks of addresses.
"""

import csv
import io
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree as xml

from coordinator.base.files import write_durably
from coordinator.config.money import MSAT_PER_UNIT
from coordinator.transactions.rails.base import PaymentTerms
from protocol.errors import PayoutFailed
from protocol.people.lightning import is_offer, lnurl_of
from protocol.text.money import MICROS

NAMESPACE = "urn:iso:std:iso:20022:tech:xsd:pain.001.001.09"


def sepa_files(terms: PaymentTerms) -> dict[str, bytes]:
    """Return the bytes of the batch's file by its suffix."""
    batch, settings = terms.batch, terms.settings
    made = datetime.fromtimestamp(terms.made_ms // 1_000, UTC)
    document = xml.Element("Document", xmlns=NAMESPACE)
    initiation = xml.SubElement(document, "CstmrCdtTrfInitn")
    message_id = f"ES{batch.key.hex()[:32]}"
    sums = {
        "NbOfTxs": str(len(batch.payees)),
        "CtrlSum": _euros(sum(terms.steps(payee) for payee in batch.payees)),
    }
    header = xml.SubElement(initiation, "GrpHdr")
    _add(header, {"MsgId": message_id, "CreDtTm": f"{made:%Y-%m-%dT%H:%M:%S}Z", **sums})
    _add(header, {"InitgPty/Nm": settings.sepa_name})
    payments = xml.SubElement(initiation, "PmtInf")
    _add(payments, {"PmtInfId": message_id, "PmtMtd": "TRF", **sums, "PmtTpInf/SvcLvl/Cd": "SEPA"})
    _add(payments, {"ReqdExctnDt/Dt": f"{made:%Y-%m-%d}", "Dbtr/Nm": settings.sepa_name})
    _add(payments, {"DbtrAcct/Id/IBAN": settings.sepa_iban, "DbtrAgt/FinInstnId/Othr/Id": "NOTPROVIDED"})
    _add(payments, {"ChrgBr": "SLEV"})
    for place, payee in enumerate(batch.payees):
        iban, _, name = payee.address.removeprefix("sepa:").partition("/")
        transfer = xml.SubElement(payments, "CdtTrfTxInf")
        _add(transfer, {"PmtId/EndToEndId": batch.payment_id(place), "Amt/InstdAmt": _euros(terms.steps(payee))})
        transfer[-1][0].set("Ccy", terms.unit.code)
        _add(transfer, {"Cdtr/Nm": name, "CdtrAcct/Id/IBAN": iban})
        _add(transfer, {"RmtInf/Ustrd": f"Echo Swarm payout {batch.number}"})
    xml.indent(document)
    return {".sepa.xml": xml.tostring(document, encoding="utf-8", xml_declaration=True) + b"\n"}


def _add(parent: xml.Element, values: dict[str, str]) -> None:
    """Add each text below its path of new elements."""
    for path, text in values.items():
        at = parent
        for name in path.split("/"):
            at = xml.SubElement(at, name)
        at.text = text


def _euros(cents: int) -> str:
    return str(Decimal(cents).scaleb(-2))


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
