"""Calls to witnesses: a real one signs a growing log, and each way in which one can fail costs its signature alone."""

import asyncio
import logging
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.base.children import script
from coordinator.base.clock import now_ms
from coordinator.config import load
from coordinator.service.witness_calls import WitnessCaller
from ledger import note, witness
from ledger.checkpoint import open_checkpoint
from ledger.note import NOTE_MAX_BYTES, KeyKind, NoteKey
from ledger.witness import PATH, AddCheckpoint, Cosigned
from protocol.errors import ConfigInvalid
from swarm_node.keys import identity
from tests.coordinator.served import Served, serve
from tests.ledger import notes

pytestmark = pytest.mark.asyncio

ANN, STRANGER = notes.witness(1), notes.witness(2)

Answer = Callable[[AddCheckpoint], Awaitable[web.Response]]


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path, f'ledger.witnesses=["{ANN[0]}"]') as made:
        await made.publish()
        await made.round.publish_checkpoint()
        yield made


@asynccontextmanager
async def witnessed_by(served: Served, answer: Answer, key: NoteKey = ANN[0]) -> AsyncIterator[WitnessCaller]:
    """Run a witness that answers as the test says; yield a caller of it."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(AddCheckpoint.parse(await request.read()))

    app = web.Application()
    app.router.add_post(f"/prefix/{PATH}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield WitnessCaller(served.round, key, f"http://127.0.0.1:{runner.addresses[0][1]}/prefix")
    finally:
        await runner.cleanup()


async def grow(served: Served, version: int) -> int:
    """A longer log with a checkpoint; its size."""
    await served.publish(version, f"weights {version}".encode())
    return size_of(served, await served.round.publish_checkpoint())


def size_of(served: Served, data: bytes) -> int:
    return open_checkpoint(data, [served.round.ledger_key]).size


async def shown(served: Served, *keys: NoteKey) -> list[int]:
    """The sizes that are shown as signed."""
    found = Cosigned.from_bytes(await (await served.client.get("/v1/ledger/cosigned")).read()).notes
    return [one.checkpoint.size for one in witness.vouched(found, [served.round.ledger_key], keys or (ANN[0],))]


def lines(request: AddCheckpoint, *signers: tuple[NoteKey, Ed25519PrivateKey]) -> web.Response:
    """An answer with the signatures of these witnesses."""
    data = request.note
    for key, private in signers:
        data = witness.cosign(data, key, private.sign, now_ms() // 1000)
    return web.Response(text="".join(map(str, note.parse(data).signatures[-len(signers) :])))


@contextmanager
def real_witness(home: Path, log: NoteKey) -> Iterator[str]:
    """Run `swarm-node ledger witness --listen` for a log; yield its address."""
    words = [script("swarm-node"), "ledger", "witness", "--home", str(home), "--name", "ann", "--log", str(log)]
    process = subprocess.Popen([*words, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process:
        try:
            line = next(line for line in process.stderr if line.startswith("listening: "))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield line.split()[1]
        finally:
            process.terminate()


async def test_a_real_witness_signs_a_log_as_it_grows(tmp_path: Path) -> None:
    seed = identity.load_or_create(tmp_path / "ann" / "witness.key").seed
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    key = NoteKey("ann", public, KeyKind.WITNESS)
    async with serve(tmp_path, f'ledger.witnesses=["{key}"]') as served:
        await served.publish()
        first = size_of(served, await served.round.publish_checkpoint())
        with real_witness(tmp_path / "ann", served.round.ledger_key) as address:
            caller = WitnessCaller(served.round, key, address)
            await caller.call()
            assert await shown(served, key) == [first]
            second = await grow(served, 2)
            await caller.call()
            assert await shown(served, key) == [second]
            newest = await (await served.client.get("/v1/ledger/checkpoint")).read()
            assert witness.cosigned(newest, [key]).keys() == {key}


async def test_a_witness_that_is_behind_or_ahead_of_our_notes_is_sent_the_proof_from_there(served: Served) -> None:
    """Notes were lost, its own or ours: 409 says what it has signed last."""
    first = size_of(served, await served.round.publish_checkpoint())
    size = await grow(served, 2)
    asked: list[int] = []

    async def behind(request: AddCheckpoint) -> web.Response:
        asked.append(request.old)
        if request.old != first:
            return web.Response(status=409, text=f"{first}\n", content_type="text/x.tlog.size")
        return lines(request, ANN)

    async with witnessed_by(served, behind) as caller:
        await caller.call()
        assert (asked, await shown(served)) == ([0, first], [size])
        await caller.call()
        assert asked == [0, first], "it has signed this one already"


async def test_a_witness_that_saw_a_longer_log_or_always_wants_another_is_not_asked_for_ever(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = iter(["1000\n", "1\n", "1\n", "nonsense", "2" * NOTE_MAX_BYTES])
    asked: list[int] = []

    async def never(request: AddCheckpoint) -> web.Response:
        asked.append(request.old)
        return web.Response(status=409, text=next(sizes))

    async with witnessed_by(served, never) as caller:
        for code in ("rolled_back", "unreachable", "malformed_message"):
            await caller.call()
            assert f"code={code}" in caplog.messages[-1]
        await caller.call()
    assert asked == [0, 0, 1, 0, 0]
    assert await shown(served) == []


async def test_a_witness_that_signs_something_else_is_not_believed(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Another text, another's signature under its name, a stranger's alone, and what is no line at all."""
    first = await served.round.publish_checkpoint()
    await grow(served, 2)
    old = witness.cosign(first, ANN[0], ANN[1].sign, now_ms() // 1000)

    async def replayed(_request: AddCheckpoint) -> web.Response:
        return web.Response(text=str(note.parse(old).signatures[-1]))

    async def forged(request: AddCheckpoint) -> web.Response:
        return lines(request, (ANN[0], STRANGER[1]))

    async def foreign(request: AddCheckpoint) -> web.Response:
        return lines(request, STRANGER)

    async def nonsense(_request: AddCheckpoint) -> web.Response:
        return web.Response(text="<html>signed</html>")

    answers = {replayed: "checkpoint_invalid", forged: "checkpoint_invalid", foreign: "not_witnessed",
               nonsense: "checkpoint_invalid"}  # fmt: skip
    for answer, code in answers.items():
        async with witnessed_by(served, answer) as caller:
            await caller.call()
            assert f"code={code}" in caplog.messages[-1], answer
    assert await shown(served) == []

    async def with_others(request: AddCheckpoint) -> web.Response:
        return lines(request, STRANGER, ANN)

    async with witnessed_by(served, with_others) as caller:
        await caller.call()
    assert len(await shown(served)) == 1


async def test_a_huge_a_slow_and_a_redirecting_witness_cost_their_signature_alone(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    closed, elsewhere = asyncio.Event(), list[str]()

    async def huge(_request: AddCheckpoint) -> web.Response:
        return web.Response(body=b"x" * (100 * NOTE_MAX_BYTES))

    async def slow(_request: AddCheckpoint) -> web.Response:
        await closed.wait()
        return web.Response()

    async def redirecting(_request: AddCheckpoint) -> web.Response:
        elsewhere.append("asked")
        return web.Response(status=307, headers={"Location": "/prefix/add-checkpoint"})

    async with witnessed_by(served, huge) as caller:
        await caller.call()
    assert "code=malformed_message" in caplog.messages[-1]
    async with witnessed_by(served, slow) as caller:
        caller.patience_s = 0.2
        await caller.call()
        closed.set()
    assert "code=unreachable" in caplog.messages[-1]
    async with witnessed_by(served, redirecting) as caller:
        await caller.call()
    assert "status 307" in caplog.messages[-1]
    assert elsewhere == ["asked"]
    assert await shown(served) == []


async def test_a_failure_is_logged_once_and_its_end_too(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator.service.witness_calls")
    works = False

    async def sometimes(request: AddCheckpoint) -> web.Response:
        return lines(request, ANN) if works else web.Response(status=503)

    async with witnessed_by(served, sometimes) as caller:
        await caller.call()
        await caller.call()
        works = True
        await caller.call()
    said = [record.getMessage() for record in caplog.records if record.name == "coordinator.service.witness_calls"]
    assert [line.split(":")[0] for line in said] == [
        f"witness={ANN[0].name} has not signed code=unreachable", f"witness={ANN[0].name} signs again",
    ]  # fmt: skip


async def test_a_setting_names_the_witnesses_that_are_called() -> None:
    words = f'ledger.witnesses=["{ANN[0]} https://ann.example.org/w/", "{STRANGER[0]}"]'
    settings = load(None, [words]).ledger
    assert settings.keys == (ANN[0], STRANGER[0])
    assert settings.addresses == {ANN[0]: "https://ann.example.org/w"}
    for wrong in ("ftp://ann.example.org", "https://", "https://a b", "https://x@ann.example.org", "",
                  "https://ann..example.org", "https://ann.example.org:99999"):  # fmt: skip
        with pytest.raises(ConfigInvalid):
            load(None, [f'ledger.witnesses=["{ANN[0]} {wrong}"]'])
