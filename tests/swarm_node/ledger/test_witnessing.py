"""A witness that logs call, over real sockets: what it signs, what it refuses and how, and that it forgets nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
import trio

from coordinator.publishing.signed_metadata import SignedMetadata
from ledger import witness
from ledger.checkpoint import Checkpoint, sign
from ledger.note import NOTE_MAX_BYTES, Note, NoteKey
from ledger.witness import REQUEST_MAX_BYTES, SIZE_KIND, AddCheckpoint
from protocol.errors import LedgerForked, RolledBack
from swarm_node.base import http_server
from swarm_node.ledger.log_reader import LogReader
from swarm_node.ledger.log_watch import LogWatch
from swarm_node.ledger.witnessing import WitnessRecord, WitnessServer
from tests.ledger import notes
from tests.ledger.test_witness import asked, proof, signed, state
from tests.swarm_node.log_world import LIFE, MORE, NOW, Log

pytestmark = pytest.mark.trio

KEY, PRIVATE = notes.witness(1)


def record_in(folder: Path) -> WitnessRecord:
    return WitnessRecord(folder, KEY, PRIVATE.sign, lambda: 1_700_000_000)


@asynccontextmanager
async def witnessing(folder: Path, *logs: NoteKey) -> AsyncIterator[httpx.AsyncClient]:
    """Run a witness of these logs; yield a client of it."""
    async with serving(WitnessServer(record_in(folder), logs or (notes.KEY,))) as client:
        yield client


@asynccontextmanager
async def serving(server: WitnessServer) -> AsyncIterator[httpx.AsyncClient]:
    """Run a witness; yield a client of it."""
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    async with (
        trio.open_nursery() as nursery,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.socket.getsockname()[1]}") as client,
    ):
        nursery.start_soon(http_server.serve, listener, server.answer)
        yield client
        nursery.cancel_scope.cancel()


async def add(client: httpx.AsyncClient, request: AddCheckpoint) -> httpx.Response:
    return await client.post("/add-checkpoint", content=request.to_bytes())


async def test_a_log_that_grows_is_signed_and_its_last_note_is_served(tmp_path: Path) -> None:
    data = b""
    async with witnessing(tmp_path) as client:
        for old, new in ((0, 3), (3, 7), (7, 7)):
            reply = await add(client, asked(old, new))
            assert reply.status_code == 200
            data = signed(state(new)) + reply.content
            assert witness.cosigned(data, [KEY]) == {KEY: 1_700_000_000}
        path = f"/{sha256(notes.KEY.name.encode()).hexdigest()}/checkpoint"
        assert (await client.get(path)).content == data
        assert (await client.get(f"/{'0' * 64}/checkpoint")).status_code == 404
        assert (await client.get("/add-checkpoint")).status_code == 404


async def test_what_cannot_be_signed_has_the_standards_status(tmp_path: Path) -> None:
    stranger = NoteKey("another.example/log", notes.THIEF.public_key().public_bytes_raw())
    thief = NoteKey(notes.KEY.name, stranger.public)
    async with witnessing(tmp_path, stranger) as client:
        assert (await add(client, asked(0, 3))).status_code == 404
    async with witnessing(tmp_path, thief) as client:
        assert (await add(client, asked(0, 3))).status_code == 403
    async with witnessing(tmp_path) as client:
        assert (await client.post("/add-checkpoint", content=b"old x\n\n")).status_code == 400
        assert (await client.post("/add-checkpoint", content=b"x" * (REQUEST_MAX_BYTES + 1))).status_code == 413
        assert (await add(client, asked(0, 5))).status_code == 200
        behind = await add(client, asked(3, 7))
        assert (behind.status_code, behind.content) == (409, b"5\n")
        assert behind.headers["content-type"] == SIZE_KIND
        forked = AddCheckpoint(5, tuple(bytes(32) for _ in proof(5, 7)), signed(state(7)))
        assert (await add(client, forked)).status_code == 422


async def test_a_rotated_key_counts_without_a_restart_and_the_old_one_until_the_new_one_has_signed(
    tmp_path: Path,
) -> None:
    """A thief of the old key could otherwise make the witness sign for as long as it runs."""
    newer = NoteKey(notes.KEY.name, notes.THIEF.public_key().public_bytes_raw())
    server = WitnessServer(record_in(tmp_path), (notes.KEY,))

    def under(old: int, new: int) -> AddCheckpoint:
        return AddCheckpoint(old, proof(old, new), sign(state(new), newer, notes.THIEF.sign))

    async with serving(server) as client:
        assert (await add(client, under(0, 3))).status_code == 403
        assert await server.trust([newer, notes.KEY]) == newer
        assert await server.trust([newer, notes.KEY]) is None
        assert (await add(client, asked(0, 3))).status_code == 200, "the coordinator was not restarted yet"
        assert (await add(client, under(3, 5))).status_code == 200
        assert (await add(client, asked(5, 7))).status_code == 403
        assert await server.trust([notes.KEY]) is None, "an old chain of roots brings no old key back"
        assert (await add(client, asked(5, 7))).status_code == 403
        assert (await add(client, under(5, 7))).status_code == 200


async def test_an_old_key_that_was_named_beside_the_newer_one_ends_with_the_first_note_of_the_newer(
    tmp_path: Path,
) -> None:
    """The rotation came before the start: the owner named the key of a join string, and the round has the next."""
    newer = NoteKey(notes.KEY.name, notes.THIEF.public_key().public_bytes_raw())
    server = WitnessServer(record_in(tmp_path), (newer, notes.KEY))
    async with serving(server) as client:
        assert await server.trust([newer, notes.KEY]) is None
        signed = AddCheckpoint(0, proof(0, 3), sign(state(3), newer, notes.THIEF.sign))
        assert (await add(client, signed)).status_code == 200
        assert (await add(client, asked(3, 5))).status_code == 403


async def test_an_old_checkpoint_is_not_signed_again_even_after_a_restart(tmp_path: Path) -> None:
    replayed = asked(0, 3)
    async with witnessing(tmp_path) as client:
        assert (await add(client, replayed)).status_code == 200
        assert (await add(client, asked(3, 7))).status_code == 200
    async with witnessing(tmp_path) as client:
        assert ((await add(client, replayed)).status_code, (await add(client, asked(3, 5))).status_code) == (409, 409)
        assert (await add(client, asked(7, 9))).status_code == 200


async def test_of_many_requests_at_once_one_is_signed(tmp_path: Path) -> None:
    statuses: list[int] = []

    async def one(client: httpx.AsyncClient, size: int) -> None:
        statuses.append((await add(client, asked(0, size))).status_code)

    async with witnessing(tmp_path) as client, trio.open_nursery() as nursery:
        for size in range(1, 9):
            nursery.start_soon(one, client, size)
    assert sorted(statuses) == [200, *[409] * 7]


@pytest.mark.parametrize("damaged", [b"", b"no note"])
async def test_a_witness_whose_record_is_damaged_signs_nothing(tmp_path: Path, damaged: bytes) -> None:
    async with witnessing(tmp_path) as client:
        assert (await add(client, asked(0, 7))).status_code == 200
        saved = tmp_path / f"{sha256(notes.KEY.name.encode()).hexdigest()}.note"
        saved.write_bytes(damaged)
        assert (await add(client, asked(0, 3))).status_code == 503
        assert saved.read_bytes() == damaged


async def test_a_note_that_leaves_no_room_for_the_signature_is_refused(tmp_path: Path) -> None:
    text = f"{state(3).text}{'x' * (NOTE_MAX_BYTES - 400)}\n"
    full = Note(text, ()).signed_by(notes.KEY, notes.PRIVATE.sign(text.encode())).to_bytes()
    async with witnessing(tmp_path) as client:
        assert (await add(client, AddCheckpoint(0, (), full))).status_code == 400
        assert (await add(client, asked(0, 3))).status_code == 200


async def test_what_a_witness_saw_before_it_had_a_record_counts(tmp_path: Path) -> None:
    """An older version kept only what it saw: a log cannot show the server another history."""
    log = Log(SignedMetadata.create(tmp_path / "keys", tmp_path / "metadata", 600.0, NOW), LIFE)
    watch = LogWatch(LogReader(log), log.round_id, tmp_path / log.round_id[:16])
    seen, _ = await watch.refresh()
    forked = sign(Checkpoint(log.key.name, 3, bytes(32)), log.key, log.metadata.sign_for_ledger)
    async with witnessing(tmp_path, log.key) as client:
        assert (await add(client, AddCheckpoint(0, (), forked))).content == f"{log.checkpoint().size}\n".encode()
        assert (await add(client, AddCheckpoint(log.checkpoint().size, (), seen))).status_code == 200


async def test_a_record_that_changed_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    first = record.sign(notes.KEY.name, None, notes.KEY, signed(state(3)))
    assert record.sign(notes.KEY.name, None, notes.KEY, signed(state(5))) is None
    assert record.find(notes.KEY.name) == first


async def test_who_reads_the_log_must_continue_what_was_signed_when_the_log_called(tmp_path: Path) -> None:
    """Both ways of one witness share its record: a log cannot show each of them another history."""
    log = Log(SignedMetadata.create(tmp_path / "keys", tmp_path / "metadata", 600.0, NOW), LIFE)
    early = await LogReader(log).checkpoint()
    log.add(MORE)
    longer = await LogReader(log).checkpoint()
    watch = LogWatch(LogReader(log), log.round_id, tmp_path / "watch")
    await watch.refresh()
    await watch.prove(early)
    await watch.prove(longer)
    forked = sign(Checkpoint(log.key.name, 3, bytes(32)), log.key, log.metadata.sign_for_ledger)
    with pytest.raises(LedgerForked):
        await watch.prove(forked)
    shorter = Log(log.metadata, LIFE)
    watch = LogWatch(LogReader(shorter), log.round_id, tmp_path / "fresh")
    await watch.refresh()
    with pytest.raises(RolledBack):
        await watch.prove(longer)
