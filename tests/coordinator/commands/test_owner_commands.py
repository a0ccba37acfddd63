"""Owner commands, from the owner's key to the payout, typed against a served round."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from typer import Typer
from typer.testing import CliRunner, Result

from coordinator.cli import app
from coordinator.transactions import owners
from ledger import store
from ledger.entry import Pending, Post
from protocol import limits
from protocol.errors import ERRORS, ConfigInvalid
from protocol.ids import NodeId
from protocol.people.owner import Delegation, PayoutAddress, seal_statement
from protocol.wire import canonical
from protocol.wire.signing import NodeKey
from protocol.work.messages import HeartbeatReply, Register
from swarm_node.cli import app as node_app
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio

SEED = (1).to_bytes(32)
NODE = NodeKey(SEED)
ROUND_FILE = str(Path(__file__).parents[3] / "examples" / "demo.toml")


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as here:
        yield here


async def run(program: Typer, *words: str) -> Result:
    """A command, beside the server."""
    return await asyncio.to_thread(CliRunner().invoke, program, list(words))


def owe(served: Served, node: NodeId, micros: int) -> None:
    claim = "c" * 64
    credit = Pending(
        claim_id=claim,
        lease_id="d" * 32,
        node_id=node,
        tokens=micros,
        price_micros_per_mtok=10**6,
        amount_micros=micros,
    )
    served.round.database.run_now(store.append_all, [credit, Post(claim_id=claim)], 0)
    served.round.database.run_now(owners.sequence, [node], 0)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return the home of a node whose key is known."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "node.key").write_text(SEED.hex())
    return folder


@pytest.fixture
def sign(tmp_path: Path) -> list[str]:
    """Return the options that name and unlock an owner's key."""
    (tmp_path / "words").write_text("correct horse battery\n")
    return ["--owner-key", str(tmp_path / "owner.key"), "--passphrase-file", str(tmp_path / "words")]


def code(result: Result) -> str:
    """Return the error code of a failed command."""
    return str(getattr(result.exception, "code", ""))


async def test_from_a_new_owner_to_a_paid_batch(served: Served, home: Path, sign: list[str]) -> None:
    join = f"{served.client.make_url('/')}#{served.round.round_id}".replace("/#", "#")
    mine = ["earnings", join, "--home", str(home)]
    await take_on(served, join, home, sign)
    owe(served, NODE.node_id, 2_000_000)
    await served.round.publish_checkpoint()
    await pay(served)

    paid = json.loads((await run(node_app, *mine, "--json")).output)
    assert (paid["total"]["paid_micros"], paid["total"]["payable_micros"]) == (2_000_000, 0)
    assert "text:IBAN DE00" in (await run(node_app, *mine)).output
    await served.round.publish_checkpoint()
    verified = await run(node_app, "ledger", "verify", join, "--json")
    assert verified.exit_code == 0, verified.exception
    assert json.loads(verified.output)["balances"][f"paid:{NODE.node_id}"] == 2_000_000

    await show_its_proof(served, join, home)
    revoked = await run(node_app, "keys", "revoke", NODE.node_id, join, *sign)
    assert revoked.output.startswith("recorded")
    assert code(await run(node_app, *mine)) == "key_revoked"


async def show_its_proof(served: Served, join: str, home: Path) -> None:
    """The payee fetches what the operator's file says, too, and proves it without a network."""
    payouts = ["ledger", "payouts", join, "--home", str(home)]
    assert (await run(node_app, *payouts)).output == (
        "batch 1: 2.00 credits to text:IBAN DE00, verified; paid, reference SEPA-1\n"
    )
    kept = home / "rounds" / served.round.round_id[:16] / "payouts" / "batch-000001.payout"
    checked = await run(node_app, "ledger", "check", join, str(kept))
    assert "contains payout 1: 2.00 credits to text:IBAN DE00, paid, reference SEPA-1." in checked.output
    found = json.loads((await run(node_app, *payouts, "--offline", "--json")).output)
    exported = json.loads((served.round.folder / "payouts" / "batch-000001.json").read_text())
    [payee] = exported["payees"]
    line = {name: exported[name] for name in ("batch", "key", "root")}
    line |= {name: payee[name] for name in ("place", "address", "amount_micros", "proof")}
    assert found == {
        "url": join.partition("#")[0],
        "payouts": [line | {"payees": 1, "state": "paid", "reference": "SEPA-1"}],
        "missing": [],
    }


async def take_on(served: Served, join: str, home: Path, sign: list[str]) -> None:
    """Make an owner, delegate the node, and say where to pay."""
    made = await run(node_app, "keys", "owner", "new", *sign)
    assert (await run(node_app, "keys", "owner", "show", *sign[:2])).output == made.output
    word = home / "delegation"
    await run(node_app, "keys", "delegate", NODE.node_id, "--out", str(word), *sign)
    where = ["keys", "address", join]
    assert code(await run(node_app, *where, "text:IBAN DE00", *sign)) == "unknown_owner"
    message = Register(name="n", price_micros_per_mtok=0, addresses=(), agent="", delegation=word.read_bytes())
    await served.call(NODE, "/v1/nodes", message, HeartbeatReply)
    counted = await run(node_app, *where, "text:IBAN DE00", *sign)
    assert counted.output.startswith("recorded: text:IBAN DE00 applies from"), counted.output
    assert code(await run(node_app, *where, "evm:0x" + "aB" * 20, *sign)) == "config_invalid"
    waiting = json.loads((await run(node_app, "earnings", join, "--home", str(home), "--json")).output)
    assert (waiting["owner"], waiting["next_address"]) == (made.output.split()[1], "text:IBAN DE00")
    assert waiting["address"] == ""


async def pay(served: Served) -> None:
    """Wait until the address counts, then make a batch and settle it by hand."""
    settings = ["--set", f"round.directory={served.round.folder}"]
    create = ["payout", "create", ROUND_FILE, *settings, "--json"]
    settle = ["payout", "settle", ROUND_FILE, "1", *settings]
    assert code(await run(app, *create)) == "payout_failed"
    served.round.database.run_now(
        lambda connection: connection.exec_driver_sql("UPDATE statements SET counts_from_ms=0")
    )
    created = json.loads((await run(app, *create)).output)
    assert [payee["amount_micros"] for payee in created["payees"]] == [2_000_000]
    assert code(await run(app, *settle, "--reference", "two words")) == "config_invalid"
    assert (await run(app, *settle, "--reference", "SEPA-1")).stdout == "batch 1: done, reference SEPA-1\n"
    assert code(await run(app, *settle, "--reference", "SEPA-2")) == "config_invalid"
    assert code(await run(app, *settle, "--set", "payouts.rail=evm")) == "config_invalid"
    listed = await run(app, "payout", "list", ROUND_FILE, *settings)
    assert listed.output == "batch 1: settled, 2.00 credits to 1 payee by rail manual, reference SEPA-1\n"
    shown = await run(app, "payout", "show", ROUND_FILE, "1", *settings)
    assert shown.output.splitlines()[1] == f"root {created['root']}"


async def test_a_balance_that_was_altered_in_the_store_is_not_paid(served: Served, home: Path, sign: list[str]) -> None:
    join = f"{served.client.make_url('/')}#{served.round.round_id}".replace("/#", "#")
    await take_on(served, join, home, sign)
    owe(served, NODE.node_id, 2_000_000)
    await served.round.publish_checkpoint()
    altered = (
        "UPDATE statements SET counts_from_ms = 0",
        "UPDATE ledger_balances SET micros = micros + 5000000 WHERE account LIKE 'payable:%'",
        "UPDATE ledger_balances SET micros = micros - 5000000 WHERE account = 'budget'",
    )
    served.round.database.run_now(lambda connection: [connection.exec_driver_sql(each) for each in altered])
    refused = await run(app, "payout", "create", ROUND_FILE, "--set", f"round.directory={served.round.folder}")
    assert "The store differs from the ledger's entries in 2 places" in str(refused.exception)
    assert not (served.round.folder / "payouts").exists()


async def test_sepa_batch_has_a_file_and_waits_for_its_reference(served: Served, home: Path, sign: list[str]) -> None:
    join = f"{served.client.make_url('/')}#{served.round.round_id}".replace("/#", "#")
    await take_on(served, join, home, sign)
    wrong = await run(node_app, "keys", "address", join, "sepa:DE89370400440532013001/Erika", *sign)
    assert code(wrong) == "config_invalid"
    assert "mistyped" in str(wrong.exception)
    address = "sepa:DE89370400440532013000/Erika Mustermann"
    assert (await run(node_app, "keys", "address", join, address, *sign)).output.startswith(f"recorded: {address}")
    owe(served, NODE.node_id, 2_005_000)
    await served.round.publish_checkpoint()
    served.round.database.run_now(
        lambda connection: connection.exec_driver_sql(
            "UPDATE statements SET counts_from_ms=0 WHERE address LIKE 'sepa%'"
        )
    )
    words = (
        "round.unit=EUR",
        "payouts.rail=sepa",
        "payouts.sepa_name=Swarm",
        "payouts.sepa_iban=DE89370400440532013000",
    )
    settings = [part for word in (*words, f"round.directory={served.round.folder}") for part in ("--set", word)]
    refused = await run(app, "payout", "create", ROUND_FILE, *settings)
    assert "cannot pay in credits" in str(refused.exception), "the unit of the launch counts, not the file's"
    resolved = served.round.folder / "resolved.json"
    launched = json.loads(resolved.read_text())
    launched["round"]["unit"] = "EUR"
    resolved.write_text(json.dumps(launched))
    made = await run(app, "payout", "create", ROUND_FILE, *settings)
    file = served.round.folder / "payouts" / "batch-000001.sepa.xml"
    assert made.output.splitlines()[-1:] == [str(file)], made.exception
    data = file.read_bytes()
    assert b">2.00</InstdAmt>" in data
    settle = ["payout", "settle", ROUND_FILE, "1", *settings]
    waiting = await run(app, *settle)
    assert code(waiting) == "payout_failed"
    assert ".sepa.xml" in str(getattr(waiting.exception, "hint", ""))
    assert (await run(app, *settle, "--reference", "B-1")).stdout == "batch 1: done, reference B-1\n"
    assert (await run(app, "payout", "show", ROUND_FILE, "1", *settings)).exit_code == 0
    assert file.read_bytes() == data


@pytest.mark.parametrize("body", [b"", b"garbage", bytes(5_000)], ids=len)
async def test_garbage_in_the_place_of_a_statement_is_refused(served: Served, body: bytes) -> None:
    response = await served.client.post("/v1/owners", data=body)
    assert response.status in {ERRORS["malformed_message"].http_status, ERRORS["message_too_large"].http_status}


async def test_a_backup_restores_the_same_owner(tmp_path: Path) -> None:
    key, saved, words = tmp_path / "owner.key", tmp_path / "stick" / "owner.key", tmp_path / "words"
    words.write_text("correct horse battery\n")
    secret = ["--passphrase-file", str(words)]
    made = await run(node_app, "keys", "owner", "new", "--owner-key", str(key), *secret)
    await run(node_app, "keys", "owner", "backup", str(saved), "--owner-key", str(key), *secret)
    over = await run(node_app, "keys", "owner", "restore", str(saved), "--owner-key", str(key), *secret)
    assert isinstance(over.exception, ConfigInvalid)
    key.unlink()
    restored = await run(node_app, "keys", "owner", "restore", str(saved), "--owner-key", str(key), *secret)
    assert restored.output == made.output
    words.write_text("another battery\n")
    wrong = await run(node_app, "keys", "owner", "backup", str(tmp_path / "new"), "--owner-key", str(key), *secret)
    assert isinstance(wrong.exception, ConfigInvalid)
    assert not (tmp_path / "new").exists()


async def test_rotated_node_keeps_nothing_of_the_old_key_and_loses_no_unsent_work(tmp_path: Path) -> None:
    folder = tmp_path / "rounds" / "r"
    (folder / "outbox").mkdir(parents=True)
    (folder / "receipts").mkdir()
    (folder / "claims").write_text("x")
    (folder / "blobs").mkdir()
    (folder / "outbox" / "a.rollout").write_bytes(b"work")
    (tmp_path / "node.key").write_text(SEED.hex())
    words = ["keys", "rotate", "--home", str(tmp_path)]
    assert isinstance((await run(node_app, *words)).exception, ConfigInvalid)
    (folder / "outbox" / "a.rollout").unlink()
    rotated = await run(node_app, *words)
    assert rotated.output.startswith(f"The node id changed from {NODE.node_id} to 12D3Koo")
    aside = tmp_path / f"old-{NODE.node_id[-8:]}"
    assert (aside / "node.key").read_text() == SEED.hex()
    assert (aside / "rounds" / "r" / "claims").exists()
    assert {path.name for path in folder.iterdir()} == {"blobs"}
    shown = json.loads((await run(node_app, "keys", "show", "--home", str(tmp_path), "--json")).output)
    assert (shown["owner"], shown["private"]) == (None, True)
    assert shown["node_id"] != NODE.node_id


async def test_a_node_without_an_owner_takes_its_history_along_to_a_new_key(tmp_path: Path) -> None:
    (tmp_path / "node.key").write_text(SEED.hex())
    words = ["keys", "rotate", "--home", str(tmp_path), "--keep-history"]
    assert "earns for its old key" in (await run(node_app, *words)).output
    shown = json.loads((await run(node_app, "keys", "show", "--home", str(tmp_path), "--json")).output)
    assert shown["owner"] == NODE.node_id
    assert not (tmp_path / "next.key").exists()
    again = await run(node_app, *words)
    assert isinstance(again.exception, ConfigInvalid), "its owner is another key now"


async def test_a_rotation_that_was_interrupted_is_finished_by_the_next_with_the_same_key(tmp_path: Path) -> None:
    (tmp_path / "node.key").write_text(SEED.hex())
    (tmp_path / "next.key").write_text("07" * 32)
    await run(node_app, "keys", "rotate", "--home", str(tmp_path))
    assert (tmp_path / "node.key").read_text() == "07" * 32


async def test_a_nodes_key_comes_back_from_its_backup_and_never_over_another(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_text("a few long words\n")
    home, other, copy = tmp_path / "home", tmp_path / "other", tmp_path / "copy"
    home.mkdir()
    (home / "node.key").write_text(SEED.hex())
    given = ("--passphrase-file", str(words))
    assert (await run(node_app, "keys", "backup", str(copy), "--home", str(home), *given)).exit_code == 0
    assert SEED.hex() not in copy.read_text()
    assert isinstance((await run(node_app, "keys", "owner", "show", "--owner-key", str(copy))).exception, ConfigInvalid)
    await run(node_app, "keys", "restore", str(copy), "--home", str(other), *given)
    assert (other / "node.key").read_text() == SEED.hex()
    assert (other / "node.key").stat().st_mode & 0o077 == 0
    for command in (["restore", str(copy), "--home", str(other)], ["backup", str(copy), "--home", str(home)]):
        refused = await run(node_app, "keys", *command, *given)
        assert isinstance(refused.exception, ConfigInvalid), command
    words.write_text("other long words\n")
    wrong = await run(node_app, "keys", "restore", str(copy), "--home", str(tmp_path / "third"), *given)
    assert isinstance(wrong.exception, ConfigInvalid)
    assert not (tmp_path / "third").exists()


async def test_ever_new_addresses_are_refused_over_http_with_when_to_come_again(served: Served) -> None:
    owner = NodeKey(b"w" * 32)
    word = seal_statement(owner, Delegation(node_id=NODE.node_id, number=1))
    message = Register(name="n", price_micros_per_mtok=0, addresses=(), agent="", delegation=word)
    await served.call(NODE, "/v1/nodes", message, HeartbeatReply)
    answers = []
    for number in range(2, 3 + limits.ADDRESSES_PER_DAY):
        said = PayoutAddress(round_id=served.round.round_id, address=f"text:{number}", number=number)
        answers.append(await served.client.post("/v1/owners", data=seal_statement(owner, said)))
    answered = answers[-1]
    assert answered.status == 429
    assert canonical.decode(await answered.read())["code"] == "too_many_statements"
    assert 0 < int(answered.headers["Retry-After"]) <= 86_400


async def test_a_wrong_fingerprint_ends_a_join_with_its_one_error(
    served: Served, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    join = f"{served.client.make_url('/')}#{'0' * 64}".replace("/#", "#")
    for shown in ("--plain", "--quiet"):
        done = await run(node_app, "join", join, "--home", str(home), "--engine", "torch", shown)
        assert code(done) == "untrusted_root", done.output
        assert "Demand" not in done.output
    assert "precision" not in caplog.text
