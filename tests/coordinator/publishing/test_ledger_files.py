"""The ledger's public files over HTTP, and a stranger who verifies all of them."""

import asyncio
import fcntl
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import sqlalchemy as sa
from typer import Typer
from typer.testing import CliRunner, Result

from coordinator.api.public import OTHERS_MAX
from coordinator.app import every
from coordinator.cli import app
from coordinator.publishing import rotation
from coordinator.publishing.signed_metadata import RoleKeys, SignedMetadata, utc_now
from coordinator.store.tables import nodes
from ledger import proof, store
from ledger.book import BookBroken
from ledger.checkpoint import open_checkpoint
from ledger.entry import Pending, Version
from ledger.proof import LedgerReceipts, ReceiptsRequest
from ledger.tables import checkpoint_table
from protocol import limits
from protocol.errors import ERRORS, ConfigInvalid, NotWitnessed, RolledBack, UntrustedMetadata
from protocol.policy import chunks
from protocol.wire import canonical
from protocol.wire.signing import Envelope
from swarm_node.cli import app as node_app
from swarm_node.ledger.receipts import kept_receipt
from tests.coordinator.served import Served, serve
from tests.ledger import notes

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as here:
        yield here


async def earn(served: Served) -> str:
    """Publish a version, and have a rollout accepted; its claim."""
    await served.publish()
    key = await served.join()
    [lease] = await served.lease(key)
    rollout = served.answer(key, lease)
    [verdict] = await served.submit(key, rollout)
    assert verdict.outcome == "accepted"
    return chunks.digest(Envelope.from_bytes(rollout).payload)


def register_many(connection: sa.Connection, count: int) -> None:
    like = connection.execute(sa.select(nodes).limit(1)).mappings().one()
    rows = [
        dict(like) | {"node_id": f"free-{n}", "owner": f"free-{n}", "last_seen_ms": 2**52 + n} for n in range(count)
    ]
    connection.execute(sa.insert(nodes), rows)


async def run(program: Typer, *words: str) -> Result:
    """A command, beside the server."""
    return await asyncio.to_thread(CliRunner().invoke, program, list(words))


async def get(served: Served, path: str) -> bytes:
    response = await served.client.get(path)
    assert response.status == 200, path
    return await response.read()


async def test_accepted_rollout_has_a_receipt_once_it_is_published(served: Served) -> None:
    claim_id = await earn(served)
    early = await served.client.get(f"/v1/receipts/{claim_id}")
    assert early.status == ERRORS["not_found"].http_status
    await served.round.publish_checkpoint()
    receipt = await get(served, f"/v1/receipts/{claim_id}")
    _, (pending,) = proof.check_receipt(receipt, served.round.round_id)
    assert isinstance(pending, Pending)
    assert pending.claim_id == claim_id


async def test_receipts_of_many_claims_come_in_one_answer(served: Served) -> None:
    claim_id, unknown = await earn(served), "f" * 64
    await served.round.publish_checkpoint()
    content = ReceiptsRequest(claims=(unknown, claim_id)).to_bytes()
    response = await served.client.post("/v1/receipts", data=content)
    assert response.headers["Cache-Control"] == "no-store"
    receipts = LedgerReceipts.from_bytes(await response.read())
    assert [(found.claim_id, len(found.entries)) for found in receipts.claims] == [(unknown, 0), (claim_id, 1)]
    (pending, settlement) = proof.check_claims(receipts, served.round.round_id)[claim_id]
    assert (pending.claim_id, settlement) == (claim_id, None)
    single = await get(served, f"/v1/receipts/{claim_id}")
    assert receipts.of_claim(receipts.claims[1]).to_bytes() == single


async def test_more_claims_than_one_answer_holds_are_refused(served: Served) -> None:
    for content in (b"", canonical.encode({"claims": ["a" * 64] * (limits.RECEIPTS_MAX + 1)})):
        response = await served.client.post("/v1/receipts", data=content)
        assert response.status in (400, 413)


async def test_a_published_version_is_an_entry(served: Served) -> None:
    await earn(served)
    await served.round.publish_checkpoint()
    size = open_checkpoint(await get(served, "/v1/ledger/checkpoint"), [served.round.ledger_key]).size
    bundle = await get(served, f"/v1/ledger/tile/entries/000.p/{size}")
    manifest = served.round.publisher.manifest(1)
    assert manifest
    assert Version(version=1, manifest_digest=chunks.digest(manifest.to_bytes())).body in bundle


async def test_the_page_of_the_log_names_the_root_that_is_served(served: Served) -> None:
    page = (await get(served, "/entries/0")).decode()
    assert "root 1 is " in page
    assert chunks.digest(await get(served, "/v1/metadata/1.root.json")) in page


async def test_what_never_changes_may_be_cached_and_the_checkpoint_not(served: Served) -> None:
    await earn(served)
    await served.round.publish_checkpoint()
    for path, caching in {
        "/v1/ledger/checkpoint": "no-store",
        "/v1/ledger/tile/0/000.p/1": "immutable",
        "/v1/ledger/tile/entries/000.p/2": "immutable",
    }.items():
        response = await served.client.get(path)
        assert response.status == 200
        assert caching in response.headers["Cache-Control"]


@pytest.mark.parametrize(
    "path",
    ["checkpoint", "tile/0/000", "tile/0/000.p/200", "tile/7/000.p/1", "tile/0/x999/x999/999", "tile/entries/000.p/0",
     "tile/0/x999/x999/x999/x999/x999/x999/999", "tile/entries/x999/x999/x999/x999/x999/999",
     "tile/0/..%2f..%2foperator.token", "tile/" + "9" * 59, "tile/%00"],
)  # fmt: skip
async def test_what_is_not_there_is_not_found(served: Served, path: str) -> None:
    response = await served.client.get(f"/v1/ledger/{path}")
    assert response.status == ERRORS["not_found"].http_status


async def test_a_node_fetches_its_receipts_and_shows_them_to_somebody(served: Served, tmp_path: Path) -> None:
    claim_id = await earn(served)
    join = f"{served.client.make_url('/')}#{served.round.round_id}".replace("/#", "#")
    folder = tmp_path / "home" / "rounds" / served.round.round_id[:16]
    words = ["ledger", "receipts", join, "--home", str(tmp_path / "home")]
    assert isinstance((await run(node_app, *words)).exception, ConfigInvalid)
    folder.mkdir(parents=True)
    (tmp_path / "home" / "node.key").write_text((1).to_bytes(32).hex())
    (folder / "claims").write_text(claim_id)

    early = await run(node_app, *words)
    assert early.output.splitlines()[-1] == "no receipt published yet: 1 claim"
    await served.round.publish_checkpoint()
    assert (await run(node_app, *words, "--offline")).output.splitlines()[-1] == "no receipt saved yet: 1 claim"
    found = await run(node_app, *words)
    assert found.output.splitlines() == [
        "posted: 0 claims, 0.00 credits, verified",
        "pending: 1 claim, 0.000006 credits, verified",
        "voided: 0 claims, 0.00 credits, verified",
        "no receipt published yet: 0 claims",
        f"saved in {folder / 'receipts'}; `swarm-node ledger check FILE` verifies each file without a network",
    ]
    shown = tmp_path / "as-it-was-mailed.proof"
    shown.write_bytes((folder / "receipts" / "000000.receipts").read_bytes())
    checked = await run(node_app, "ledger", "check", join, str(shown))
    assert checked.output == "Verified: the signed log contains 1 claim: 1 pending, 0.000006 credits.\n"
    (row,) = (await run(node_app, "ledger", "check", join, str(shown), "--json")).output.splitlines()
    assert f'"claim_id": "{claim_id}", "state": "pending", "amount_micros": 6' in row

    shown.write_bytes(kept_receipt(folder / "receipts", claim_id) or b"")
    checked = await run(node_app, "ledger", "check", join, str(shown))
    size = await served.round.database.read(store.size)
    assert (checked.exit_code, checked.output) == (
        0,
        f"Verified: the signed root of {size} entries contains claim {claim_id[:12]}… (pending): "
        "0.000006 credits for 6 tokens.\n",
    )
    assert f'"claim_id": "{claim_id}"' in (await run(node_app, "ledger", "check", join, str(shown), "--json")).output


async def test_a_receipt_names_the_rounds_own_unit_to_somebody_who_never_joined(tmp_path: Path) -> None:
    async with serve(tmp_path, "round.unit=EUR") as served:
        claim_id = await earn(served)
        await served.round.publish_checkpoint()
        receipt = await get(served, f"/v1/receipts/{claim_id}")
        content = ReceiptsRequest(claims=(claim_id,)).to_bytes()
        receipts = await (await served.client.post("/v1/receipts", data=content)).read()
        join = f"http://127.0.0.1:9#{served.round.round_id}"
    for data in (receipt, receipts):
        (tmp_path / "shown").write_bytes(data)
        checked = await run(node_app, "ledger", "check", join, str(tmp_path / "shown"), "--home", str(tmp_path))
        assert "0.000006 EUR" in checked.output, checked.output


async def test_two_witnesses_of_one_home_cannot_vouch_for_two_histories(served: Served, tmp_path: Path) -> None:
    await served.round.publish_checkpoint()
    join = f"{served.client.make_url('/')}#{served.round.round_id}".replace("/#", "#")
    folder = tmp_path / "witness" / served.round.round_id[:16]
    folder.mkdir(parents=True)
    words = ["ledger", "witness", join, "--home", str(tmp_path)]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert isinstance((await run(node_app, *words)).exception, ConfigInvalid)
    assert (await run(node_app, *words)).exit_code == 0
    assert isinstance((await run(node_app, *words, "--name", "a b")).exception, ConfigInvalid)


async def test_a_log_that_is_not_what_was_signed_stops_the_coordinator(served: Served) -> None:
    """Other failures of a timer pass; this one would go on crediting on a damaged book."""
    await served.round.publish_checkpoint()
    served.round.database.run_now(lambda connection: connection.execute(checkpoint_table.update().values(size=99)))
    with pytest.raises(BookBroken):
        await every(0.0, served.round.publish_checkpoint)


async def test_a_stranger_finds_the_root_that_a_running_coordinator_has_replaced(tmp_path: Path) -> None:
    """The operator rotates a key twice over, from the same state: one root for the log, the other for this stranger."""
    async with serve(tmp_path) as served:
        folder = served.round.folder
    for name in ("keys", "metadata"):
        shutil.copytree(folder / name, tmp_path / "other" / name)
    for place in (folder, tmp_path / "other"):
        metadata, keys = SignedMetadata(place / "keys", place / "metadata", 600.0), RoleKeys(place / "keys")
        prepared = rotation.prepare(metadata, keys, "timestamp", 1, 1, utc_now())
        rotation.install(metadata, keys, prepared, utc_now())
    async with serve(tmp_path) as served:
        await served.round.publish_checkpoint()
        join = f"{served.client.make_url('/')}#{served.round.round_id}".replace("/#", "#")
        verify = ("ledger", "verify", join)
        honest = await run(node_app, *verify)
        assert (honest.exit_code, "no root documents" in honest.output) == (0, False), honest.output
        root = folder / "metadata" / "2.root.json"
        logged = chunks.digest(root.read_bytes())
        shutil.copyfile(tmp_path / "other" / "metadata" / "2.root.json", root)
        found = await run(node_app, *verify, "--save", str(tmp_path / "saved"))
        assert isinstance(found.exception, UntrustedMetadata)
        assert f"root 2 is served as {chunks.digest(root.read_bytes())}" in found.exception.message
        assert logged in found.exception.message
        root.unlink()
        assert isinstance((await run(node_app, *verify)).exception, RolledBack)
    offline = await run(node_app, *verify, "--from", str(tmp_path / "saved"))
    assert isinstance(offline.exception, UntrustedMetadata)


async def test_free_registrations_do_not_keep_anybody_from_verifying(served: Served) -> None:
    await earn(served)
    await served.round.publish_checkpoint()
    await served.round.database.run(register_many, 5 * OTHERS_MAX)
    rows = json.loads(await get(served, "/v1/leaderboard"))["nodes"]
    assert rows[0]["pending_micros"] > 0, "who has a claim is there, however long ago it was heard of"
    assert len(rows) == 1 + OTHERS_MAX
    assert f"free-{5 * OTHERS_MAX - 1}" in {row["node_id"] for row in rows}
    assert "free-0" not in {row["node_id"] for row in rows}
    assert b"/nodes/free-0" in await get(served, "/?q=free-0"), "pages have all"
    join = f"{served.client.make_url('/')}#{served.round.round_id}".replace("/#", "#")
    verified = await run(node_app, "ledger", "verify", join)
    assert verified.exit_code == 0, verified.output


async def test_a_stranger_verifies_everything_vouches_for_it_and_the_operator_checks_the_store(
    served: Served, tmp_path: Path
) -> None:
    await earn(served)
    await served.round.publish_checkpoint()
    size = await served.round.database.read(store.size)
    join = f"{served.client.make_url('/')}#{served.round.round_id}".replace("/#", "#")
    saved = tmp_path / "saved"

    verified = await run(node_app, "ledger", "verify", join, "--save", str(saved), "--json")
    assert verified.exit_code == 0, verified.output
    assert f'"entries": {size}' in verified.output
    assert '"served_roots": 1, "logged_roots": 1' in verified.output
    offline = await run(node_app, "ledger", "verify", join, "--from", str(saved), "--json")
    assert offline.output == verified.output

    vouched = await run(node_app, "ledger", "witness", join, "--home", str(tmp_path / "witness"), "--name", "somebody")
    assert vouched.exit_code == 0, vouched.output
    assert "— somebody " in vouched.stdout
    key = vouched.stderr.partition("witness key: ")[2].strip()
    (saved / "ledger" / "checkpoint").write_text(vouched.stdout)
    demanding = ["ledger", "verify", join, "--from", str(saved), "--witness", key, "--quorum"]
    assert (await run(node_app, *demanding, "1")).exit_code == 0
    assert isinstance((await run(node_app, *demanding, "2")).exception, ConfigInvalid)
    named = demanding[:-1]
    assert (await run(node_app, *named)).exit_code == 0
    assert (await run(node_app, *named, "--witness", key)).exit_code == 0
    nowhere = await run(node_app, "ledger", "verify", join, "--from", str(tmp_path / "nowhere"))
    assert isinstance(nowhere.exception, ConfigInvalid)
    assert "has no saved ledger" in nowhere.exception.message
    another, _ = notes.witness(9)
    not_all = await run(node_app, *named, "--witness", str(another))
    assert isinstance(not_all.exception, NotWitnessed)
    mistyped = await run(node_app, *named, "--witness", key[:-1])
    assert isinstance(mistyped.exception, ConfigInvalid)

    served.round.close()
    settings = ["--set", f"round.directory={served.round.folder}"]
    round_file = Path(__file__).parents[3] / "examples" / "demo.toml"
    checked = await run(app, "fsck", str(round_file), *settings)
    assert (checked.exit_code, checked.output) == (0, f"{size} entries, 0 differences\n")
