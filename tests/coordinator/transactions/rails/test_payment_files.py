"""Files for banks, services and nodes: what they say, that they say it once, and that the scripts pay nobody twice."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree as xml

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.config import parse
from coordinator.config.money import MSAT_PER_UNIT, find_rail_unit
from coordinator.transactions.rails.base import PaymentTerms, TransferBatch
from coordinator.transactions.rails.files import (
    LINES_MAX,
    NAMESPACE,
    lightning_files,
    paypal_files,
    sepa_files,
    stripe_files,
    write_files,
)
from ledger.payees import Payee
from protocol.errors import ConfigInvalid, PayoutFailed
from protocol.people.payout_addresses import EXAMPLES, checked_address

ROUND = "a" * 64
MADE_MS = int(datetime(2026, 11, 28, 12, tzinfo=UTC).timestamp() * 1000)
OFFER = "lno1zcss9mk8y3wkklfvevcrszlmu23kfrxh49px20665dqwmn4p72pksese"
SETTINGS = {
    "sepa": 'sepa_name = "Swarm e.V. (Payouts)"\nsepa_iban = "DE89370400440532013000"',
    "paypal": "",
    "stripe": "",
    "lightning": "",
}


needs_programs = pytest.mark.skipif(
    not (shutil.which("jq") and shutil.which("curl")), reason="scripts need jq and curl"
)


def terms(rail: str, unit: str, *payees: tuple[str, int], more: str = "") -> PaymentTerms:
    file = f'[round]\nunit = "{unit}"\n[payouts]\nrail = "{rail}"\n{SETTINGS[rail]}\n{more}'
    paid = tuple(
        Payee(f"owner {place}", checked_address(where), micros) for place, (where, micros) in enumerate(payees)
    )
    found = find_rail_unit(rail, unit)
    assert found
    return PaymentTerms(TransferBatch(ROUND, 7, paid), found, MADE_MS, parse(tomllib.loads(file)).payouts)


SEPA = terms(
    "sepa",
    "EUR",
    ("sepa:DE89370400440532013000/Erika Mustermann", 12_340_000),
    ("sepa:GB29NWBK60161331926819/O'Brien, Sons (2)", 10_000),
)


def test_sepa_file_has_every_payee_and_its_control_sums() -> None:
    (data,) = sepa_files(SEPA).values()
    names = {"": NAMESPACE}
    document = xml.fromstring(data)
    assert document.tag == f"{{{NAMESPACE}}}Document"
    for level in ("GrpHdr", "PmtInf"):
        assert document.findtext(f".//{level}/NbOfTxs", namespaces=names) == "2"
        assert document.findtext(f".//{level}/CtrlSum", namespaces=names) == "12.35"
    transfers = document.findall(".//CdtTrfTxInf", names)
    read = [
        [transfer.findtext(path, namespaces=names) for path in ("Amt/InstdAmt", "Cdtr/Nm", "CdtrAcct/Id/IBAN")]
        for transfer in transfers
    ]
    assert read == [
        ["12.34", "Erika Mustermann", "DE89370400440532013000"],
        ["0.01", "O'Brien, Sons (2)", "GB29NWBK60161331926819"],
    ]
    assert {amount.get("Ccy") for amount in document.findall(".//InstdAmt", names)} == {"EUR"}
    ids = [transfer.findtext("PmtId/EndToEndId", namespaces=names) for transfer in transfers]
    assert ids == [SEPA.batch.payment_id(0), SEPA.batch.payment_id(1)]
    message_id = document.findtext(".//GrpHdr/MsgId", namespaces=names) or ""
    assert message_id == document.findtext(".//PmtInf/PmtInfId", namespaces=names)
    assert max(map(len, [message_id, *map(str, ids)])) <= 35, "the standard's limit"
    assert document.findtext(".//ReqdExctnDt/Dt", namespaces=names) == "2026-11-28"
    assert document.findtext(".//DbtrAcct/Id/IBAN", namespaces=names) == "DE89370400440532013000"


def test_sepa_elements_are_in_the_order_of_the_schema() -> None:
    document = xml.fromstring(next(iter(sepa_files(SEPA).values())))
    payments = document[0][1]
    assert [part.tag.partition("}")[2] for part in payments] == [
        "PmtInfId", "PmtMtd", "NbOfTxs", "CtrlSum", "PmtTpInf", "ReqdExctnDt", "Dbtr", "DbtrAcct", "DbtrAgt", "ChrgBr",
        "CdtTrfTxInf", "CdtTrfTxInf",
    ]  # fmt: skip
    assert [part.tag.partition("}")[2] for part in payments[-1]] == ["PmtId", "Amt", "Cdtr", "CdtrAcct", "RmtInf"]
    assert [part.tag.partition("}")[2] for part in document[0][0]] == [
        "MsgId", "CreDtTm", "NbOfTxs", "CtrlSum", "InitgPty",
    ]  # fmt: skip


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=20))
def test_sums_of_a_file_are_those_of_its_payments(cents: list[int]) -> None:
    (data,) = sepa_files(terms("sepa", "EUR", *((EXAMPLES["sepa"], 10_000 * amount) for amount in cents))).values()
    document = xml.fromstring(data)
    amounts = [Decimal(part.text or "") for part in document.iter(f"{{{NAMESPACE}}}InstdAmt")]
    assert amounts == [Decimal(amount) / 100 for amount in cents]
    assert {Decimal(part.text or "") for part in document.iter(f"{{{NAMESPACE}}}CtrlSum")} == {sum(amounts)}


def test_paypal_file_has_a_line_for_each_payee() -> None:
    payees = (("paypal:erika@example.org", 12_340_000), ("paypal:m+tag@example.org", 10_000))
    batch = terms("paypal", "€", *payees, more='paypal_decimal = ","')
    (data,) = paypal_files(batch).values()
    assert list(csv.reader(io.StringIO(data.decode()))) == [
        ["erika@example.org", "12,34", "EUR", batch.batch.payment_id(0), "Echo Swarm payout 7", "PAYPAL"],
        ["m+tag@example.org", "0,01", "EUR", batch.batch.payment_id(1), "Echo Swarm payout 7", "PAYPAL"],
    ]
    assert len(batch.batch.payment_id(10**6)) <= 30, "PayPal's limit"
    (data,) = paypal_files(terms("paypal", "JPY", ("paypal:erika@example.org", 12_000_000))).values()
    assert data.startswith(b"erika@example.org,12,JPY,")


@pytest.mark.parametrize(("payees", "lines"), [(1, [1]), (LINES_MAX, [LINES_MAX]), (LINES_MAX + 1, [LINES_MAX, 1])])
def test_a_large_batch_is_several_paypal_files(payees: int, lines: list[int]) -> None:
    files = paypal_files(terms("paypal", "USD", *[(EXAMPLES["paypal"], 10_000)] * payees))
    assert [data.count(b"\n") for data in files.values()] == lines
    assert list(files) == [".paypal.csv", ".paypal-2.csv"][: len(lines)]


@pytest.mark.parametrize(
    ("unit", "micros", "msat"),
    [("BTC", 1, 100_000), ("mBTC", 1, 100), ("sat", 1_000, 1), ("sats", 21_000_000, 21_000), ("msat", 5_000_000, 5)],
)
def test_lightning_amounts_are_exact_in_every_unit_of_bitcoin(unit: str, micros: int, msat: int) -> None:
    (data,) = lightning_files(terms("lightning", unit, (EXAMPLES["lightning"], micros))).values()
    assert f"pay lnurl {TransferBatch(ROUND, 7, ()).payment_id(0)} {msat} https://example.org/" in data.decode()
    found = find_rail_unit("lightning", unit)
    assert found
    assert found.step_micros * MSAT_PER_UNIT[found.code] % 1_000_000 == 0, "a step is a whole number of msat"


@pytest.mark.parametrize(
    ("rail", "unit", "payee"),
    [
        ("sepa", "EUR", EXAMPLES["sepa"]),
        ("paypal", "USD", EXAMPLES["paypal"]),
        ("stripe", "USD", EXAMPLES["stripe"]),
        ("lightning", "sat", EXAMPLES["lightning"]),
    ],
)
def test_file_is_the_same_every_time_and_never_replaced_by_another(
    rail: str, unit: str, payee: str, tmp_path: Path
) -> None:
    batch = terms(rail, unit, (payee, 5_000_000))
    (path,) = write_files(rail, batch, tmp_path)
    before = path.read_bytes()
    assert write_files(rail, batch, tmp_path) == [path]
    assert path.read_bytes() == before
    with pytest.raises(PayoutFailed, match="other content"):
        write_files(rail, terms(rail, unit, (payee, 6_000_000)), tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ('[round]\nunit = "credits"\n[payouts]\nrail = "sepa"', "sepa cannot pay in credits.*EUR"),
        ('[round]\nunit = "USD"\n[payouts]\nrail = "lightning"', "lightning cannot pay in USD.*BTC"),
        ('[round]\nunit = "$"\n[payouts]\nrail = "stripe"', "stripe cannot pay in"),
        ('[round]\nunit = "₿"\n[payouts]\nrail = "lightning"', "lightning cannot pay in"),
        ('[round]\nunit = "EUR"\n[payouts]\nrail = "sepa"\nsepa_name = "Swarm"', "sepa_iban"),
        ('[round]\nunit = "EUR"\n[payouts]\nrail = "sepa"\nsepa_iban = "DE89370400440532013000"', "sepa_name"),
    ],
)
def test_settings_that_a_rail_cannot_pay_by_are_refused(file: str, reason: str) -> None:
    with pytest.raises(ConfigInvalid, match=reason):
        parse(tomllib.loads(file))


@pytest.mark.parametrize(
    "data",
    [
        next(iter(stripe_files(terms("stripe", "EUR", (EXAMPLES["stripe"], 10_000))).values())),
        next(iter(lightning_files(terms("lightning", "sat", (f"lightning:{OFFER}", 1_000))).values())),
    ],
    ids=["stripe", "lightning"],
)
def test_scripts_have_no_faults_that_shellcheck_knows(data: bytes, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_bytes(data)
    assert b"@" + b"PAYMENTS@" not in data
    done = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


class Transfers(BaseHTTPRequestHandler):
    """Stripe's transfers: `transfers` is the list; it forgets idempotency keys at once, as after a day."""

    transfers: list[dict[str, str]]
    faults: list[str]

    def do_GET(self) -> None:
        group = parse_qs(urlsplit(self.path).query)["transfer_group"][0]
        if self.faults and self.faults[0] == "list":
            self.faults.pop()
            self._answer(500, {"error": {"message": "overloaded"}})
            return
        self._answer(200, {"object": "list", "data": [row for row in self.transfers if row["transfer_group"] == group]})

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        row = {name: values[0] for name, values in form.items()}
        assert self.headers["Authorization"] == "Bearer sk_test"
        assert self.headers["Idempotency-Key"] == row["transfer_group"]
        if self.faults and self.faults[0] == "refused":
            self.faults.pop()
            self._answer(400, {"error": {"message": "insufficient funds"}})
            return
        self.transfers.append(row)
        if self.faults and self.faults.pop() == "lost":
            return  # paid, and the answer is lost
        self._answer(200, {"object": "transfer"})

    def _answer(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def stripe() -> Iterator[tuple[str, type[Transfers]]]:
    class Served(Transfers):
        transfers: list[dict[str, str]] = []  # noqa: RUF012 - of this class only, which one test has
        faults: list[str] = []  # noqa: RUF012 - of this class only, which one test has

    server = ThreadingHTTPServer(("127.0.0.1", 0), Served)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Served
    server.shutdown()
    thread.join()
    server.server_close()


def run(script: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run(["sh", script, *words], env=environment, capture_output=True, text=True, check=False)


@needs_programs
@pytest.mark.parametrize("fault", ["", "list", "refused", "lost"])
def test_stripe_script_pays_everybody_once_whatever_is_lost(
    fault: str, stripe: tuple[str, type[Transfers]], tmp_path: Path
) -> None:
    url, served = stripe
    batch = terms(
        "stripe", "EUR", ("stripe:acct_1032D82eZvKYlo2C", 12_340_000), ("stripe:acct_2032D82eZvKYlo2C", 10_000)
    )
    (script,) = write_files("stripe", batch, tmp_path)
    served.faults[:] = [fault] * bool(fault)
    first = run(script, STRIPE_API_KEY="sk_test", STRIPE_API=url)
    assert first.returncode == (1 if fault else 0), first
    again = run(script, STRIPE_API_KEY="sk_test", STRIPE_API=url)
    assert (again.returncode, again.stdout.split(": ")[1]) == (0, "2 paid, 0 not paid\n"), again
    paid = sorted((row["destination"], row["amount"], row["currency"]) for row in served.transfers)
    assert paid == [("acct_1032D82eZvKYlo2C", "1234", "eur"), ("acct_2032D82eZvKYlo2C", "1", "eur")]


def test_stripe_script_needs_a_key(tmp_path: Path) -> None:
    (script,) = write_files("stripe", terms("stripe", "EUR", (EXAMPLES["stripe"], 10_000)), tmp_path)
    done = run(script, STRIPE_API_KEY="")
    assert done.returncode != 0
    assert "Set STRIPE_API_KEY" in done.stderr


NODE = '''#!{python} -IS
"""A Lightning node's command line and the services of LNURL: invoices are new every time, and each is paid once."""
import json, os, sys
from pathlib import Path

program, arguments = Path(sys.argv[0]).name, sys.argv[1:]
book = Path(os.environ["BOOK"])
state = json.loads(book.read_text()) if book.exists() else {{"invoices": {{}}, "paid": [], "faults": []}}
fault = os.environ.get("FAULT", "")

def once(name):
    if fault == name and name not in state["faults"]:
        state["faults"].append(name)
        return True
    return False

def answer(value, code=0):
    book.write_text(json.dumps(state))
    print(json.dumps(value) if not isinstance(value, str) else value)
    sys.exit(code)

def invoice(msat):
    name = "lnbc1q" + "q" * len(state["invoices"])
    state["invoices"][name] = msat + (1_000 if once("greedy") else 0)
    return name

def pay(name):
    if once("unreachable"):
        answer("no route", 1)
    if name in state["paid"]:
        answer({{"status": "complete"}}) if program == "lightning-cli" else answer("invoice is already paid", 1)
    state["paid"].append(name)
    if once("killed"):
        answer("connection lost", 1)
    answer({{"status": "complete"}})

if program == "curl":
    url = arguments[arguments.index("--url") + 1]
    assert url.startswith("https://") and arguments[arguments.index("--proto") + 1] == "=https"
    if "amount=" in url:
        answer({{"pr": "$(touch hacked)" if once("hostile") else invoice(int(url.partition("amount=")[2])).upper()}})
    answer({{"tag": "payRequest", "minSendable": 1, "maxSendable": 10**9, "callback": "https://pay.example/cb?x=1"}})
elif arguments[0] == "-k":
    answer({{"invoice": invoice(int(arguments[3].partition("=")[2]))}})
elif arguments[0] == "decode":
    answer({{"valid": True, "amount_msat": state["invoices"][arguments[1]]}})
elif arguments[0] == "decodepayreq":
    answer({{"num_msat": str(state["invoices"][arguments[1]])}})
elif arguments[0] in ("pay", "payinvoice"):
    pay(arguments[-1])
'''
"""A node that keeps its book on the disk: no real one runs without a chain and channels."""


def node(folder: Path) -> dict[str, str]:
    """Put the node's program and a curl before those of the machine; return the environment that finds them."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("lightning-cli", "lncli", "curl"):
        (programs / name).write_text(NODE.format(python=sys.executable))
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "BOOK": str(folder / "book.json"), "HOME": str(folder / "home")}


@needs_programs
@pytest.mark.parametrize("fault", ["", "greedy", "hostile", "unreachable", "killed"])
@pytest.mark.parametrize("cli", ["lightning-cli", "lncli"])
def test_lightning_script_pays_everybody_once_whatever_is_lost(cli: str, fault: str, tmp_path: Path) -> None:
    environment = node(tmp_path)
    payees = [("lightning:erika@example.org", 21_000), ("lightning:max+swarm@example.org", 5_000)]
    if cli == "lightning-cli":
        payees.append((f"lightning:{OFFER}", 7_000))
    (script,) = write_files("lightning", terms("lightning", "sat", *payees), tmp_path)
    first = run(script, cli, FAULT=fault, **environment)
    assert first.returncode == (1 if fault else 0), first
    again = run(script, cli, FAULT=fault, **environment)
    assert again.returncode == 0, again
    book = json.loads((tmp_path / "book.json").read_text())
    paid = sorted(book["invoices"][name] for name in book["paid"])
    assert paid == sorted(micros // 1_000 for _, micros in payees)
    assert book["faults"] == [fault] * bool(fault)
    assert not list(tmp_path.rglob("hacked"))


@needs_programs
def test_two_lightning_scripts_at_once_pay_the_same_invoice(tmp_path: Path) -> None:
    """The second finds the first one's invoice, even if it has requested one of its own."""
    environment = node(tmp_path)
    batch = terms("lightning", "sat", ("lightning:erika@example.org", 21_000))
    (script,) = write_files("lightning", batch, tmp_path)
    kept = tmp_path / "home/.echo-swarm/payouts" / batch.batch.key.hex() / f"{batch.batch.payment_id(0)}.invoice"
    kept.parent.mkdir(parents=True)
    (tmp_path / "book.json").write_text(json.dumps({"invoices": {"lnbc1first": 21}, "paid": [], "faults": []}))
    kept.write_text("lnbc1first")
    assert run(script, "lightning-cli", **environment).returncode == 0
    assert json.loads((tmp_path / "book.json").read_text())["paid"] == ["lnbc1first"]


def test_lncli_is_told_that_it_cannot_pay_an_offer(tmp_path: Path) -> None:
    (script,) = write_files("lightning", terms("lightning", "sat", (f"lightning:{OFFER}", 7_000)), tmp_path)
    done = run(script, "lncli", **node(tmp_path))
    assert done.returncode == 1
    assert "use lightning-cli" in done.stderr
    assert not (tmp_path / "book.json").exists()
    assert run(script).returncode == 2
