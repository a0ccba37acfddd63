"""The file of rail sepa: a batch as SEPA credit transfers, in the XML that banks take (ISO 20022 pain.001.001.09).

- MsgId and EndToEndId come from the batch's key: a bank refuses a file whose MsgId it has seen, and both are the same
  whenever the file is written.
- Banks find a payee's bank by the IBAN, so no BIC is needed.
- The day of execution is the day on which the batch was made: a bank moves it to the next business day.
"""

from datetime import UTC, datetime
from decimal import Decimal
from xml.etree import ElementTree as xml

from coordinator.transactions.rails.base import PaymentTerms

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
