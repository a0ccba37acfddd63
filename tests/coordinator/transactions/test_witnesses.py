"""Witnesses' signatures, collected: by whom, of what, and how a lying, stale, replayed or forked one fares."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.base.clock import now_ms
from coordinator.store.state import Database
from ledger import note, store, witness
from ledger.checkpoint import Checkpoint, open_checkpoint, sign
from ledger.note import NOTE_MAX_BYTES, KeyKind, NoteKey
from ledger.tables import cosignatures_table
from ledger.tree import EMPTY_ROOT
from ledger.witness import CosignatureReply, Cosigned, Witnesses
from protocol.wire import canonical
from tests.coordinator.served import Served, serve
from tests.ledger import notes

pytestmark = pytest.mark.asyncio

ANN, BEN, STRANGER = (notes.witness(number) for number in (1, 2, 3))
NAMED = [ANN[0], BEN[0]]


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A round with two witnesses and a signed checkpoint."""
    keys = ", ".join(f'"{key}"' for key in NAMED)
    async with serve(tmp_path, f"ledger.witnesses=[{keys}]") as here:
        await here.publish()
        await here.round.publish_checkpoint()
        yield here


async def grow(served: Served, version: int = 2) -> bytes:
    """A longer log, and its checkpoint."""
    await served.publish(version, f"weights {version}".encode())
    await served.round.publish_checkpoint()
    return await newest(served)


async def newest(served: Served) -> bytes:
    return await (await served.client.get("/v1/ledger/checkpoint")).read()


async def kept(served: Served) -> tuple[bytes, ...]:
    return Cosigned.from_bytes(await (await served.client.get("/v1/ledger/cosigned")).read()).notes


async def send(served: Served, data: bytes) -> str:
    """Send a cosignature; return the outcome, or the code of an error."""
    response = await served.post("/v1/ledger/cosignatures", data)
    body = await response.read()
    if response.status == 200:
        return CosignatureReply.from_bytes(body).outcome
    said = canonical.decode(body)
    assert isinstance(said, dict)
    return str(said["code"])


def now_s() -> int:
    return now_ms() // 1000


def cosigned(data: bytes, who: tuple[NoteKey, Ed25519PrivateKey], time_s: int | None = None) -> bytes:
    key, private = who
    return witness.cosign(data, key, private.sign, now_s() if time_s is None else time_s)


def forked(served: Served, size: int) -> bytes:
    """Another history, with the ledger's own signature."""
    key = served.round.ledger_key
    return sign(Checkpoint(key.name, size, bytes(32)), key, served.round.metadata.sign_for_ledger)


async def test_what_witnesses_sign_stands_below_the_checkpoint_and_is_kept_when_a_newer_one_comes(
    served: Served,
) -> None:
    first = await newest(served)
    assert await send(served, cosigned(first, ANN)) == "recorded"
    assert await send(served, cosigned(first, BEN)) == "recorded"
    assert witness.cosigned(await newest(served), NAMED).keys() == set(NAMED)
    second = await grow(served)
    assert witness.cosigned(second, NAMED) == {}
    assert await send(served, cosigned(second, BEN)) == "recorded"
    assert witness.cosigned(await newest(served), NAMED).keys() == {BEN[0]}
    found = witness.vouched(await kept(served), [served.round.ledger_key], NAMED)
    sizes = {one.key: one.checkpoint.size for one in found}
    keys = [served.round.ledger_key]
    assert sizes == {ANN[0]: open_checkpoint(first, keys).size, BEN[0]: open_checkpoint(second, keys).size}
    assert Witnesses((ANN[0], BEN[0]), 2).require(found) == sizes[ANN[0]], "both vouch for the beginning"
    assert Witnesses((ANN[0], BEN[0]), 1).require(found) == sizes[BEN[0]]


async def test_a_strangers_signature_and_a_lying_one_are_refused(served: Served) -> None:
    data = await newest(served)
    assert await send(served, cosigned(data, STRANGER)) == "not_witnessed"
    response = await served.post("/v1/ledger/cosignatures", cosigned(data, STRANGER))
    assert f"Your key {STRANGER[0].name} is not in the round's list of witnesses.".encode() in await response.read()
    response = await served.post("/v1/ledger/cosignatures", data)
    assert b"No witness has signed this checkpoint." in await response.read()
    forged = cosigned(data, (ANN[0], STRANGER[1]))
    assert await send(served, forged) == "checkpoint_invalid"
    moved = note.parse(cosigned(data, ANN, 5)).signatures[-1]
    later = note.Note(note.parse(data).text, (*note.parse(data).signatures,)).signed_by(
        ANN[0], (6).to_bytes(8) + moved.value[8:]
    )
    assert await send(served, later.to_bytes()) == "checkpoint_invalid", "the time is signed, too"
    of_a_log = NoteKey(ANN[0].name, ANN[0].public, KeyKind.LOG)
    assert of_a_log.id != ANN[0].id
    assert await kept(served) == ()


async def test_a_fork_with_the_ledgers_own_signature_is_refused_and_told(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    size = open_checkpoint(await newest(served), [served.round.ledger_key]).size
    for other in (size, size - 1, size + 100):
        assert await send(served, cosigned(forked(served, other), ANN)) == "ledger_forked"
    assert "signed a different log" in caplog.text
    another = sign(Checkpoint(notes.KEY.name, 0, EMPTY_ROOT), notes.KEY, notes.PRIVATE.sign)
    assert await send(served, cosigned(another, ANN)) == "checkpoint_invalid", "another round's"
    assert await kept(served) == ()


async def test_a_replayed_or_stale_word_replaces_none(served: Served) -> None:
    first = await newest(served)
    old, new = cosigned(first, ANN, now_s() - 50), cosigned(first, ANN, now_s() - 40)
    assert [await send(served, data) for data in (old, new, new, old)] == [
        "recorded", "recorded", "already_recorded", "stale",
    ]  # fmt: skip
    second = await grow(served)
    later = cosigned(second, ANN)
    assert await send(served, later) == "recorded"
    before = await kept(served)
    assert [await send(served, data) for data in (new, old, cosigned(first, ANN))] == ["stale"] * 3
    assert await kept(served) == before
    assert await send(served, cosigned(second, ANN, now_s() + 3600)) == "request_expired"


async def test_nobody_hangs_other_lines_on_what_is_kept(served: Served) -> None:
    data = cosigned(await newest(served), STRANGER)
    for number in range(9, 40):
        data = cosigned(data, notes.witness(number))
    assert await send(served, cosigned(data, ANN)) == "recorded"
    (found,) = await kept(served)
    assert len(note.parse(found).signatures) == 2
    assert witness.cosigned(await newest(served), [STRANGER[0]]) == {}


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"x\n\n", b"a" * NOTE_MAX_BYTES, b"a" * (NOTE_MAX_BYTES + 1)])
async def test_what_is_no_note_is_refused(served: Served, data: bytes) -> None:
    assert await send(served, data) in ("checkpoint_invalid", "message_too_large")


async def test_a_witness_that_is_no_longer_named_is_not_shown(tmp_path: Path, served: Served) -> None:
    await send(served, cosigned(await newest(served), ANN))
    settings = served.round.config.ledger.model_copy(update={"witnesses": (str(BEN[0]),)})
    settings.__dict__.pop("keys", None)
    served.round.config = served.round.config.model_copy(update={"ledger": settings})
    assert await kept(served) == ()
    assert witness.cosigned(await newest(served), NAMED) == {}


async def test_a_restart_keeps_what_was_recorded(tmp_path: Path, served: Served) -> None:
    await send(served, cosigned(await newest(served), ANN))
    served.round.close()
    database = Database(tmp_path / "round" / "state.db")
    rows = await asyncio.to_thread(
        database.run_now, lambda connection: connection.execute(sa.select(cosignatures_table)).all()
    )
    assert [row.witness for row in rows] == [str(ANN[0])]
    database.close()


async def test_witnesses_with_long_names_do_not_make_the_checkpoint_too_large_to_read(tmp_path: Path) -> None:
    """The lines that do not fit are in `/v1/ledger/cosigned`, like those of older checkpoints."""
    private = ANN[1]
    named = [
        NoteKey(f"{'𝒘' * 195}{number:05}", private.public_key().public_bytes_raw(), KeyKind.WITNESS)
        for number in range(24)
    ]
    keys = ", ".join(f'"{key}"' for key in named)
    async with serve(tmp_path, f"ledger.witnesses=[{keys}]") as served:
        await served.publish()
        await served.round.publish_checkpoint()
        for key in named:
            bare = await served.round.database.read(store.checkpoint)
            assert bare
            assert await send(served, witness.cosign(bare, key, private.sign, now_ms() // 1000)) == "recorded"
        read = note.parse(await newest(served))
        assert 1 < len(read.signatures) < 1 + len(named)
        assert len(await kept(served)) == len(named)
