"""The page that checks a whole round, in a real Chromium: a sound round passes, and each lie of a server is named.

A server between the browser and a real coordinator passes everything on, and changes what a test tells it to.
"""

import base64
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import ClientSession, web
from blake3 import blake3

from coordinator.pages import verifying
from coordinator.publishing import rotation
from coordinator.publishing.signed_metadata import LEDGER, RoleKeys, SignedMetadata
from ledger import drawing, note, store, tiles, witness
from ledger.book import EntryOutcome, Folding
from ledger.checkpoint import Checkpoint, open_checkpoint, sign
from ledger.drawing import LotteryDraw
from ledger.entry import DEPOSITS_MAX_MICROS, KINDS, Entry, Post, Reveal, VerdictEntry, parse
from ledger.tiles import Tile
from ledger.training import TrainingChain
from ledger.witness import Cosigned
from protocol.errors import ProofInvalid, SwarmError
from protocol.policy import chunks
from protocol.wire import canonical
from tests.coordinator.pages.browser import CHROMIUM, Tab
from tests.coordinator.pages.rounds import earn
from tests.coordinator.served import Served, serve
from tests.ledger import notes, values
from tests.swarm_node.ledger.test_logged_roots import another, rotate
from tests.swarm_node.log_world import LIFE, MORE, NOW, Log

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]

ANN, BEN = notes.witness(1), notes.witness(2)
CHANGED_HEADERS = {"content-length", "content-encoding", "transfer-encoding"}

Change = Callable[[bytes], bytes | None]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A public round with two nodes that earned, and a witness that signed all but the newest entries."""
    settings = f'ledger.witnesses=["{ANN[0]}"]', "round.public_url=https://swarm.example.org"
    async with serve(tmp_path_factory.mktemp("round"), *settings) as made:
        await made.publish()
        await earn(made, *[await made.join(number) for number in (1, 2)])
        await made.round.publish_checkpoint()
        signed = witness.cosign(await checkpoint(made), ANN[0], ANN[1].sign, 1)
        assert (await made.post("/v1/ledger/cosignatures", signed)).status == 200
        await made.publish(2, b"other weights")
        await made.round.publish_checkpoint()
        yield made


async def checkpoint(served: Served) -> bytes:
    return await (await served.client.get("/v1/ledger/checkpoint")).read()


@asynccontextmanager
async def lying(served: Served, changes: Mapping[str, Change]) -> AsyncIterator[str]:
    """Yield the address of a server that passes on the coordinator's answers; one of None is a 404."""

    async def answer(request: web.Request) -> web.Response:
        async with ClientSession() as session, session.get(served.client.make_url(request.path_qs)) as real:
            body: bytes | None = await real.read()
            headers = {name: text for name, text in real.headers.items() if name.lower() not in CHANGED_HEADERS}
            if real.status == 200 and request.path.removeprefix("/v1/") in changes:
                assert body is not None
                body = changes[request.path.removeprefix("/v1/")](body)
            return web.Response(body=body or b"", status=404 if body is None else real.status, headers=headers)

    async with listening(answer) as where:
        yield where


@asynccontextmanager
async def listening(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """Yield the address of a server that answers as the test says."""
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def check(tab: Tab, where: str, *, pinned: str = "", witnesses: str = "", typed: str = "") -> dict[str, str]:
    """Check a round on the page as a visitor does; return what the page says."""
    if not tab.requests:
        await tab.open(f"{where}/verify.html")
    fields = {"round": typed or (f"{where}#{pinned}" if pinned else where), "witnesses": witnesses}
    await tab.look(f"Object.entries({json.dumps(fields)}).forEach(([id, text]) => {{ byId(id).value = text; }})"
                   .replace("byId", "document.getElementById"))  # fmt: skip
    await tab.click("#check")
    await tab.until("!document.getElementById('check').disabled && document.getElementById('verdict').className")
    said: dict[str, str] = await tab.look(
        "Object.fromEntries(['verdict', 'mistake', 'proved', 'left']"
        ".map((id) => [id, document.getElementById(id).innerText]))"
    )
    said["link"] = await tab.look("document.querySelector('#mistake a')?.getAttribute('href') ?? ''")
    return said


def size_of(data: bytes) -> int:
    return int(data.split(b"\n")[1])


def bundle_name(size: int) -> str:
    return f"ledger/tile/{tiles.tile_of(Tile.BUNDLE, 0, size).name}"


async def test_a_sound_round_is_proved_to_who_has_its_join_string_and_its_witnesses_key(
    served: Served, tab: Tab
) -> None:
    where = str(served.client.make_url("")).rstrip("/")
    size = size_of(await checkpoint(served))
    said = await check(tab, where, pinned=served.round.round_id, witnesses=str(ANN[0]))
    assert said["mistake"] == ""
    assert said["verdict"] == f"Proved: {size} entries."
    assert "The round is the one of your join string" in said["proved"]
    assert "for 2 nodes, the sums of the first" in said["proved"]
    assert "The log names exactly the root documents" in said["proved"]
    assert "1 of your 1 witness signed at least the first" in said["proved"]
    assert "trusts the key" not in said["left"]
    said = await check(tab, where)
    assert "since the witnesses' last signatures" not in said["left"], "none of them counted"
    assert f"The page trusts the key that {where} names." in said["left"]
    assert f"The signatures of {ANN[0].name}: paste the keys" in said["left"]
    said = await check(tab, where, witnesses=f"{ANN[0]}\n{BEN[0]}\n{ANN[0]}")
    assert "1 of your 2 witnesses signed" in said["proved"]
    assert said["verdict"] == "Proved, except for witnesses."
    assert f"That {BEN[0].name} signed this log" in said["left"]
    assert all("/v1/metadata/2.root.json" in one for one in tab.complaints), "only that there is no second root"
    assert all(one.startswith(where) for one in tab.requests), tab.requests


@pytest.mark.parametrize(("typed", "keys"), [("hello world", ""), ("", "abc")])
async def test_what_a_visitor_typed_wrong_is_no_failed_proof(served: Served, tab: Tab, typed: str, keys: str) -> None:
    where = str(served.client.make_url("")).rstrip("/")
    said = await check(tab, where, witnesses=keys, typed=typed)
    assert said["verdict"] == "Nothing was checked."
    assert said["mistake"].startswith(("This is not the address of a round", "abc is not the key of a witness"))


async def test_an_altered_entry_is_named_with_a_link(served: Served, tab: Tab) -> None:
    size = size_of(await checkpoint(served))

    def alter(data: bytes) -> bytes:
        bodies = tiles.unbundle(data, size)
        place = next(index for index, body in enumerate(bodies) if isinstance(parse(body), Post))
        bodies[place] = bodies[place].replace(b"post", b"past")
        altered.append(place)
        return tiles.bundle(bodies)

    altered: list[int] = []
    async with lying(served, {bundle_name(size): alter}) as where:
        said = await check(tab, where)
    assert said["mistake"].startswith(f"Entry {altered[0]} was altered: it is not the one that the signed root")
    assert said["link"] == f"{where}/entries/{altered[0]}"
    assert said["proved"] == ""


async def test_a_sum_that_was_altered_on_the_leaderboard_is_named(served: Served, tab: Tab) -> None:
    def raise_it(data: bytes) -> bytes:
        board = json.loads(data)
        board["nodes"][0]["posted_micros"] += 1
        return json.dumps(board).encode()

    async with lying(served, {"leaderboard": raise_it}) as where:
        said = await check(tab, where)
    assert "as posted_micros of node 12D3Koo" in said["mistake"]


async def test_a_truncated_log_is_found(served: Served, tab: Tab) -> None:
    size = size_of(await checkpoint(served))
    cut = {bundle_name(size): lambda data: tiles.bundle(tiles.unbundle(data, size)[:-1])}
    async with lying(served, cut) as where:
        said = await check(tab, where)
    assert said["mistake"].startswith(f"Entry {size - 1} is missing: the log was cut off before it.")


async def test_a_log_that_is_shorter_than_a_witness_saw_is_found(served: Served, tab: Tab) -> None:
    """An older state, signed as it was: only the board and the witness know better."""
    first = await served.round.database.read(store.root_at, 1)
    key = served.round.ledger_key
    old = sign(Checkpoint(key.name, 1, first), key, served.round.metadata.sign_for_ledger)

    def nothing_earned(_data: bytes) -> bytes:
        return json.dumps({"ledger_size": 0, "nodes": []}).encode()

    async with lying(served, {"ledger/checkpoint": lambda _data: old, "leaderboard": nothing_earned}) as where:
        said = await check(tab, where)
    assert said["mistake"].startswith("A witness has signed ")
    assert "and the log has 1: it was cut off." in said["mistake"]


async def test_a_wrong_signature_is_found(served: Served, tab: Tab) -> None:
    def forge(data: bytes) -> bytes:
        parsed = note.parse(data)
        line = parsed.signatures[0]
        value = bytes([line.value[0] ^ 1, *line.value[1:]])
        return note.Note(parsed.text, (note.Signature(line.name, line.key_id, value),)).to_bytes()

    async with lying(served, {"ledger/checkpoint": forge}) as where:
        said = await check(tab, where)
    assert said["mistake"] == "The checkpoint's signature is not valid."


async def test_a_foreign_key_is_found(served: Served, tab: Tab) -> None:
    """Another log's key proves nothing, and neither does another round's root to who has the join string."""

    def of_a_thief(data: bytes) -> bytes:
        signed = open_checkpoint(data, [served.round.ledger_key])
        return sign(signed, note.NoteKey(signed.origin, notes.KEY.public), notes.PRIVATE.sign)

    async with lying(served, {"ledger/checkpoint": of_a_thief}) as where:
        said = await check(tab, where)
        assert said["mistake"] == "No ledger key of this round has signed the checkpoint."
        said = await check(tab, where, pinned="ab" * 32)
        assert said["mistake"].startswith("The first root document is not that of this round")


async def test_another_history_that_a_witness_signed_is_found(served: Served, tab: Tab) -> None:
    key = served.round.ledger_key
    other = sign(Checkpoint(key.name, 2, bytes(32)), key, served.round.metadata.sign_for_ledger)
    forked = Cosigned(notes=(witness.cosign(other, ANN[0], ANN[1].sign, 1),)).to_bytes()
    async with lying(served, {"ledger/cosigned": lambda _data: forked}) as where:
        said = await check(tab, where)
    assert said["mistake"].startswith("A witness was shown another history: its 2 entries are not the first of these.")


async def test_a_witness_whose_signature_is_wrong_is_named(served: Served, tab: Tab) -> None:
    forged = Cosigned(notes=(witness.cosign(await checkpoint(served), ANN[0], BEN[1].sign, 1),)).to_bytes()
    async with lying(served, {"ledger/cosigned": lambda _data: forged}) as where:
        said = await check(tab, where, witnesses=str(ANN[0]))
    assert said["mistake"] == f"The signature of {ANN[0].name} is not valid."


async def test_notes_that_no_witness_signed_are_not_said_to_be_of_witnesses(served: Served, tab: Tab) -> None:
    """A server can write any name below a checkpoint: sentences in the place of a name are not shown."""
    parsed = note.parse(await checkpoint(served))
    invented = [note.Signature(name, b"1234", bytes(72)) for name in ("invented", "All\u2060is\u2060proved")]
    named = Cosigned(notes=(note.Note(parsed.text, (*parsed.signatures, *invented)).to_bytes(),)).to_bytes()
    async with lying(served, {"ledger/cosigned": lambda _data: named}) as where:
        said = await check(tab, where)
    assert said["verdict"].startswith("Proved: ")
    assert "witness" not in said["proved"]
    assert "1 checkpoint that the server lists apart is a beginning of this log." in said["proved"]
    assert "The signatures of invented: paste the keys" in said["left"]


@pytest.mark.parametrize(
    ("path", "data"), [("leaderboard", b'{"ledger_size":0,"nodes":[null]}'), ("ledger/cosigned", b"\xc1")]
)
async def test_a_document_that_is_malformed_is_wrong_and_not_only_unfinished(
    served: Served, tab: Tab, path: str, data: bytes
) -> None:
    async with lying(served, {path: lambda _data: data}) as where:
        said = await check(tab, where)
    assert said["verdict"] == "Not proved: something is wrong.", said


async def test_of_a_file_with_millions_of_empty_entries_only_the_wanted_ones_are_read(served: Served, tab: Tab) -> None:
    """An empty entry has two bytes, and costs the browser a hundred."""
    await tab.open(str(served.client.make_url("/entries/0")))
    found = await tab.look("""(async () => {
      const { unbundle } = await import("/static/tree.js");
      const data = new Uint8Array(2000);
      let read = 0;
      data.subarray = (...ends) => { read += 1; return Uint8Array.prototype.subarray.apply(data, ends); };
      return [unbundle(data, 0, 3).length, read];
    })()""")
    assert found == [3, 3]


async def test_a_saved_copy_checks_a_round_from_the_disk(served: Served, tab: Tab, tmp_path: Path) -> None:
    """A file of the disk may read a coordinator's public files; a copy that a server sends reaches only that server."""
    where = str(served.client.make_url("")).rstrip("/")
    saved = tmp_path / "saved.html"
    saved.write_bytes(await (await served.client.get("/verify.html")).read())
    await tab.call("Page.navigate", url=f"{saved.as_uri()}?round={where}#{served.round.round_id}")
    await tab.until("document.readyState === 'complete' && document.getElementById('round')?.value")
    assert await tab.look("document.getElementById('round').value") == f"{where}#{served.round.round_id}"
    said = await check(tab, where, pinned=served.round.round_id)
    assert (said["mistake"], said["verdict"].split(":")[0]) == ("", "Proved")
    async with lying(served, {}) as elsewhere:
        await tab.open(f"{elsewhere}/verify.html")
        said = await check(tab, where)
    assert "This copy of the page cannot reach" in said["mistake"]


async def test_a_saved_copy_says_what_checks_a_round_with_a_private_address(tab: Tab, tmp_path: Path) -> None:
    async with serve(tmp_path) as private:
        where = str(private.client.make_url("")).rstrip("/")
        saved = tmp_path / "saved.html"
        saved.write_bytes(await (await private.client.get("/verify.html")).read())
        await tab.call("Page.navigate", url=saved.as_uri())
        await tab.until("document.readyState === 'complete' && document.getElementById('round')")
        said = await check(tab, where)
    assert f"its address is private: then open {where}/verify.html" in said["mistake"]


@asynccontextmanager
async def published(log: Log) -> AsyncIterator[str]:
    """Yield the address of a server with the files of a log, and the page."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/verify.html":
            return web.Response(text=verifying.render(), content_type="text/html")
        data = await log.file(request.path.removeprefix("/v1/"), 2**30)
        return web.Response(body=data or b"", status=200 if data else 404)

    async with listening(answer) as where:
        yield where


def log_in(folder: Path) -> Log:
    """A log of 600 entries whose ledger key was replaced, and whose roots it names."""
    log = Log(SignedMetadata.create(folder / "keys", folder / "metadata", 600.0, NOW))
    log.log_roots()
    log.add(LIFE)
    rotate(folder, LEDGER)
    log.log_roots()
    log.add(MORE)
    return log


async def test_keys_that_were_replaced_are_followed_and_others_than_the_log_names_are_found(
    tab: Tab, tmp_path: Path
) -> None:
    log = log_in(tmp_path)
    async with published(log) as where:
        said = await check(tab, where, pinned=log.round_id)
        assert (said["mistake"], said["verdict"]) == ("", f"Proved: {log.checkpoint().size} entries.")
        assert "The chain of 2 root documents" in said["proved"]
        shown = another(tmp_path, "timestamp")
        rotate(tmp_path, "timestamp")
        log.log_roots()
        log.lies["metadata/3.root.json"] = shown.roots()[2]
        said = await check(tab, where, pinned=log.round_id)
        assert said["mistake"].startswith("Root document 3 is not the one that entry")
        log.lies["metadata/3.root.json"] = None
        said = await check(tab, where, pinned=log.round_id)
        assert "which is not served: newer keys are withheld." in said["mistake"]


async def test_a_gap_that_the_root_keys_signed_is_said_and_one_that_does_not_hold_is_found(
    tab: Tab, tmp_path: Path
) -> None:
    log = log_in(tmp_path)
    key, signed_by = log.key, log.metadata.sign_for_ledger
    kept = log.checkpoint()
    lost = sign(Checkpoint(key.name, kept.size + 50, bytes(32)), key, signed_by)
    log.lies["ledger/cosigned"] = Cosigned(notes=(witness.cosign(lost, ANN[0], ANN[1].sign, 1),)).to_bytes()
    keys = RoleKeys(tmp_path / "keys")
    metadata = SignedMetadata(tmp_path / "keys", tmp_path / "metadata", 600.0)
    gap: dict[str, int | str] = {"size": kept.size, "root": kept.root.hex(), "lost_size": kept.size + 50}
    rotation.install(metadata, keys, rotation.prepare_resumption(metadata, keys, gap, NOW), NOW)
    log.log_roots()
    async with published(log) as where:
        said = await check(tab, where, pinned=log.round_id)
        assert said["mistake"] == ""
        assert f"the log goes on after its first {kept.size} entries; later ones were lost." in said["proved"]
        gap = {"size": kept.size - 5, "root": "ab" * 32, "lost_size": kept.size}
        rotation.install(metadata, keys, rotation.prepare_resumption(metadata, keys, gap, NOW), NOW)
        log.log_roots()
        said = await check(tab, where, pinned=log.round_id)
        assert said["mistake"].startswith(f"Root document 4 says that the log goes on after {kept.size - 5} entries")


POOL: list[Entry] = [
    values.deposit(500), values.deposit(700, "wire-2"), values.deposit(DEPOSITS_MAX_MICROS, "wire-3"),
    *(values.credit(number, of=number % 2 + 1) for number in range(4)), values.credit(1, of=1, tokens=200),
    *(values.post(number) for number in range(4)), *(values.void(number) for number in range(4)),
    values.appeal(1), values.ruling(1), values.ruling(2, "denied"), values.appeal(2), values.reinstate(2),
    values.reinstate(3, reason="other"), values.verdict(1), values.owner_act(1), values.version(1), values.root(1),
    values.commitment(1), values.reveal(1), values.reveal(1, bytes(31) + b"x"), values.batch(1),
    values.batch(2, payees=2), values.payout(1), values.payout(1, micros=299),
    values.payout(2, of=2, micros=1), values.payout(2, micros=299),
    values.paid(1), values.paid(2, of=2), values.formed(1), values.formed(2, groups="c"), values.trained(1, "1", "2"),
    values.trained(1, "1", "3", attempt=2), values.trained(2, "3", "4", groups="c"),
    values.trained(2, "2", "4", groups="c"), values.trained(3, "9", "5", by=1),
    values.retraction(1, 1, 1, "1", "7"), values.retraction(1, 2, 2, "2", "8", owners=(1, 2)),
    values.trained(2, "7", "4", groups="c", by=1), values.trained(2, "7", "4", by=1),
    values.version(2), values.retraction(2, 1, 2, "1", "6"), values.formed(3), values.trained(3, "6", "5", by=2),
]  # fmt: skip


def outcomes(entries: list[Entry]) -> list[bool]:
    """Return which of these entries `swarm-node ledger verify` would accept, each after the accepted ones."""
    folding, training, accepted = Folding(), TrainingChain(), list[bool]()
    for index, entry in enumerate(entries):
        accepted.append(folding.add(entry) is EntryOutcome.APPLIED)
        if accepted[-1]:
            try:
                training.add(index, entry)
            except ProofInvalid:
                accepted[-1] = False
    return accepted


async def test_the_browsers_book_accepts_what_ours_accepts(served: Served, tab: Tab) -> None:
    """Thousands of entries of all kinds in a random order, most of them impossible where they stand."""
    chance = random.Random(26)
    logs = [chance.choices(POOL, k=120) for _ in range(60)]
    assert {entry.kind for entry in POOL} == set(KINDS)
    await tab.open(str(served.client.make_url("/entries/0")))
    written = [[base64.b64encode(entry.body).decode() for entry in entries] for entries in logs]
    found = await tab.look(f"""(async () => {{
      const {{ Book }} = await import("/static/book.js");
      const {{ parseEntry }} = await import("/static/entries.js");
      const {{ unbase64 }} = await import("/static/signed.js");
      return {json.dumps(written)}.map((log) => {{
        const book = new Book();
        return log.map((text, index) => {{
          const entry = parseEntry(unbase64(text), index);
          try {{ book.add(index, entry); return true; }} catch {{ return false; }}
        }});
      }});
    }})()""")
    ours = [outcomes(entries) for entries in logs]
    assert found == ours
    applied = {
        entry.kind for log, said in zip(logs, ours, strict=True) for entry, one in zip(log, said, strict=True) if one
    }
    assert applied == set(KINDS)


ODD: tuple[object, ...] = (
    0, -1, 2**40, 2**40 + 1, 2**53, 2**53 + 1, 2**62, 2**62 + 1, 2**64 - 1, -(2**53) - 1, -(2**63), 1.0, True, None,
    "", "a\n", "x" * 101, "\u0661", b"1" * 32, b"1" * 33, [], {}, "__proto__", "constructor",
)  # fmt: skip
"""Values that are at the edge of a field, or of another type."""


async def test_the_browser_reads_the_entries_that_we_read(served: Served, tab: Tab) -> None:
    """Each byte of an entry is changed, each field replaced and removed: both accept the result, or neither does."""
    chance = random.Random(26)
    changed = []
    for entry in {entry.kind: entry for entry in POOL}.values():
        for place in range(len(entry.body)):
            body = bytearray(entry.body)
            body[place] ^= 1 << chance.randrange(8)
            changed.append(bytes(body))
        value = canonical.decode(entry.body)
        for name, was in value.items():
            changed += [canonical.encode({**value, name: odd}) for odd in (*ODD, [was])]
            changed.append(canonical.encode({key: value[key] for key in value if key != name}))
        changed += [canonical.encode({**value, name: 1}) for name in ("__proto__", "constructor", "zzz", "")]
    await tab.open(str(served.client.make_url("/entries/0")))
    found = await tab.look(f"""(async () => {{
      const {{ parseEntry }} = await import("/static/entries.js");
      const {{ unbase64 }} = await import("/static/signed.js");
      return {json.dumps([base64.b64encode(body).decode() for body in changed])}.map((text) => {{
        try {{ parseEntry(unbase64(text), 0); return true; }} catch {{ return false; }}
      }});
    }})()""")
    differing = [body for body, theirs in zip(changed, found, strict=True) if theirs is not is_entry(body)]
    assert differing == []
    assert any(found)


def is_entry(body: bytes) -> bool:
    try:
        parse(body)
    except SwarmError:
        return False
    return True


async def test_the_browser_draws_the_audits_that_we_draw(served: Served, tab: Tab) -> None:
    """A revealed epoch with a list, and what was wrong with an audit of it, one thing at a time."""
    secret, claims = bytes(range(32)), [values.claim(number) for number in range(1, 300)]
    draws = [LotteryDraw(claim, 1_000_000 if number % 3 == 0 else number) for number, claim in enumerate(claims)]
    drawn = drawing.check(secret, drawing.draws_digest(draws), draws)
    reveal = Reveal(epoch=1, secret=secret, draws_digest=drawing.draws_digest(draws))
    credits = [values.credit(number) for number in range(1, 300)]
    verdicts = [
        VerdictEntry(claim_id=one, outcome="pass", validator="replay/1", evidence_digest="e" * 64) for one in drawn
    ]
    paid: list[Entry] = [values.post(number) for number in range(1, 300)]
    logs: list[list[Entry]] = [
        [*credits, *verdicts, *paid, reveal],
        [*credits, *verdicts[1:], *paid, verdicts[0], reveal],
        [*credits, verdicts[0].model_copy(update={"outcome": "hard"}), *verdicts[1:], *paid, reveal],
        [*credits[1:], *verdicts, *paid, reveal],
        [*credits, *verdicts, *paid, reveal.model_copy(update={"draws_digest": "d" * 64})],
    ]
    await tab.open(str(served.client.make_url("/entries/0")))
    written = [[base64.b64encode(entry.to_bytes()).decode() for entry in log] for log in logs]
    data = json.dumps([[draw.claim_id, draw.rate_ppm] for draw in draws])
    found = await tab.look(f"""(async () => {{
      const {{ Audits }} = await import("/static/draws.js");
      const {{ parseEntry }} = await import("/static/entries.js");
      const {{ unbase64, utf8 }} = await import("/static/signed.js");
      return {json.dumps(written)}.map((log) => {{
        const audits = new Audits();
        log.forEach((text, index) => audits.add(index, parseEntry(unbase64(text), index)));
        try {{
          audits.checkList(audits.reveals[0], utf8({json.dumps(data)}));
          audits.finish();
          return `${{audits.drawn}} of ${{audits.claims}}`;
        }} catch (error) {{ return error.message; }}
      }});
    }})()""")
    assert found[0] == f"{len(drawn)} of {len(claims)}"
    assert found[1].endswith("which was drawn, and no audit had looked at it.")
    assert found[2].endswith("pays a claim that an audit had found wrong.")
    assert found[3].startswith("The list of epoch 1 names a claim twice, or one that the ledger does not have.")
    assert found[4].startswith("The list of epoch 1 is not the one that entry ")


async def test_the_browsers_hashes_are_those_of_blake3(served: Served, tab: Tab) -> None:
    """Sizes at the edges of a block, a chunk and a tree of chunks, with a key and without."""
    await tab.open(str(served.client.make_url("/entries/0")))
    sizes = [0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 2049, 5121]
    found = await tab.look(f"""(async () => {{
      const {{ blake3 }} = await import("/static/blake.js");
      const {{ hex }} = await import("/static/signed.js");
      const data = (size) => Uint8Array.from({{ length: size }}, (_, place) => place % 251);
      return {sizes}.map((size) => [hex(blake3(data(size))), hex(blake3(data(size), data(32)))]);
    }})()""")
    data = [bytes(place % 251 for place in range(size)) for size in sizes]
    assert found == [[blake3(one).hexdigest(), blake3(one, key=bytes(range(32))).hexdigest()] for one in data]
    assert found[0][0] == chunks.digest(b"")
