"""C2SP tools that others wrote, aics-tlog and aics-witness, against our log, our witness and our calls to witnesses.

They need a newer Python than ours may be, so they run as programs of an environment of their own (`make test-tlog`).
"""

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.base.clock import now_ms
from coordinator.service.witness_calls import WitnessCaller
from coordinator.transactions import witnesses
from ledger import store, tiles, witness
from ledger.checkpoint import Checkpoint, open_checkpoint, sign
from ledger.entry import Deposit, Entry
from ledger.note import KeyKind, NoteKey
from ledger.tiles import Tile
from ledger.witness import Cosigned
from swarm_node.keys import identity
from tests.coordinator.served import Served, serve
from tests.coordinator.service.test_witness_calls import real_witness
from tests.processes.programs import PATIENCE_S, free_address

ROOT = Path(__file__).parents[2]
TOOLS = Path(os.environ.get("SWARM_TLOG_TOOLS", ROOT / ".venv-tlog")) / "bin"
FEED = Path(__file__).with_name("tlog") / "feed.py"

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.processes,
    pytest.mark.skipif(
        not (TOOLS / "aics-tlog").exists(), reason="the tools are not installed; make test-tlog has them"
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A log of three files of entries, the last one partial."""
    async with serve(tmp_path_factory.mktemp("round")) as made:
        await append(made, 0, 600)
        yield made


async def append(served: Served, first: int, count: int) -> bytes:
    """More entries, and the checkpoint that covers them."""
    more: list[Entry] = [Deposit(reference=f"wire-{n}", amount_micros=n + 1) for n in range(first, first + count)]
    await served.round.database.run(store.append_all, more, now_ms())
    return await served.round.publish_checkpoint()


def size_of(served: Served, note: bytes) -> int:
    return open_checkpoint(note, [served.round.ledger_key]).size


async def tool(name: str, *words: str, code: int = 0) -> dict[str, Any]:
    """Run a command of a tool; return its report."""
    process = await asyncio.create_subprocess_exec(TOOLS / name, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == code, (words, output, errors)
    found: dict[str, Any] = json.loads(output)
    return found


def log_of(served: Served) -> list[str]:
    """The options that name the log: its key, and the address of its tiles."""
    return ["--log-key", str(served.round.ledger_key), "--tiles", str(served.client.make_url("/v1/ledger/"))]


async def test_their_verifier_accepts_our_checkpoint_and_no_other_keys(served: Served) -> None:
    report = await tool("aics-tlog", "verify-checkpoint", *log_of(served))
    assert report["size"] == size_of(served, await served.round.publish_checkpoint())
    other = NoteKey(served.round.ledger_key.name, Ed25519PrivateKey.generate().public_key().public_bytes_raw())
    options = ["--log-key", str(other), *log_of(served)[2:]]
    await tool("aics-tlog", "verify-checkpoint", *options, code=1)


async def test_their_verifier_finds_our_entries_where_we_say_and_no_altered_one(served: Served, tmp_path: Path) -> None:
    """The first and last entry of full and partial files, from our tiles alone."""
    size = size_of(served, await served.round.publish_checkpoint())
    for index in (0, 255, 256, 511, 512, size - 1):
        bundle = await served.round.database.read(store.read_file, tiles.tile_of(Tile.BUNDLE, index // 256, size))
        entry = tiles.unbundle(bundle, min(256, size - index // 256 * 256))[index % 256]
        leaf = tmp_path / "leaf"
        leaf.write_bytes(entry)
        words = ["verify-inclusion", "--index", str(index), "--leaf", str(leaf), *log_of(served)]
        await tool("aics-tlog", *words)
        leaf.write_bytes(entry[:-1] + bytes([entry[-1] ^ 1]))
        await tool("aics-tlog", *words, code=1)


async def test_their_verifier_sees_that_our_log_only_grew_and_a_fork_of_it(served: Served, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_bytes(await served.round.publish_checkpoint())
    await append(served, 1_000, 300)
    words = ["verify-consistency", "--old-checkpoint", str(old), *log_of(served)]
    await tool("aics-tlog", *words)
    key = served.round.ledger_key
    old.write_bytes(sign(Checkpoint(key.name, 100, bytes(32)), key, served.round.metadata.sign_for_ledger))
    await tool("aics-tlog", *words, code=1)


async def test_their_verifier_counts_our_witness_for_its_quorum(served: Served, tmp_path: Path) -> None:
    seed = identity.load_or_create(tmp_path / "ann" / "witness.key").seed
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    key = NoteKey("ann", public, KeyKind.WITNESS)
    with real_witness(tmp_path / "ann", served.round.ledger_key) as address:
        await WitnessCaller(served.round, key, address).call()
    signed = tmp_path / "cosigned"
    ours = await served.round.database.read(_cosigned, key)
    signed.write_bytes(ours)
    words = ["--note", str(signed), *log_of(served)[:2], "--witness-key", str(key), "--quorum"]
    await tool("aics-tlog", "verify-checkpoint", *words, "1", "--max-age", "3600")
    await tool("aics-tlog", "verify-checkpoint", *words, "2", code=1)


def _cosigned(connection: sa.Connection, key: NoteKey) -> bytes:
    (note,) = witnesses.cosigned(connection, [key]).notes
    return note


@contextmanager
def their_witness(folder: Path, log: NoteKey) -> Iterator[tuple[str, NoteKey]]:
    """Run aics-witness for a log; yield its address and key."""
    address, config = free_address(), str(folder / "witness.json")

    def run(*words: str) -> str:
        command = [str(TOOLS / "aics-witness"), *words, "--config", config]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout

    folder.mkdir()
    written = re.search(r"\S+\+[0-9a-f]{8}\+\S+", run("init", "--name", "theirs.example/w1", "--listen", address))
    assert written is not None
    run("add-log", "--origin", log.name, "--vkey", str(log))
    process = subprocess.Popen([str(TOOLS / "aics-witness"), "serve", "--config", config], stderr=subprocess.DEVNULL)
    try:
        yield f"http://{address}", NoteKey.parse(written[0])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


async def test_their_witness_signs_our_log_as_it_grows_and_no_fork_of_it(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with their_witness(tmp_path / "theirs", served.round.ledger_key) as (address, key):
        caller = WitnessCaller(served.round, key, address)
        for count in (10, 300, 1):
            note = await append(served, size_of(served, await served.round.publish_checkpoint()) + 2_000, count)
            while (signed := await signed_size(served, key)) != size_of(served, note):
                await caller.call()  # it may still be starting
                assert signed <= size_of(served, note)
        async with serve(tmp_path) as other:  # another history under the same key
            other.round.metadata, other.round.ledger_key = served.round.metadata, served.round.ledger_key
            await append(other, 5_000, 2_000)
            caller = WitnessCaller(other.round, key, address)
            await caller.call()
        assert "status 422" in caplog.messages[-1]


async def signed_size(served: Served, key: NoteKey) -> int:
    found: Cosigned = await served.round.database.read(witnesses.cosigned, [key])
    signed = witness.vouched(found.notes, [served.round.ledger_key], [key])
    return max((one.checkpoint.size for one in signed), default=0)


def fed(folder: Path, *sizes: int) -> list[dict[str, Any]]:
    """Let their log grow to these sizes under our witness; a negative size is another history of that size."""
    seed = identity.load_or_create(folder / "witness.key").seed
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    key = NoteKey("ann", public, KeyKind.WITNESS)
    words = [str(TOOLS / "python"), str(FEED), str(key), "theirs.example/log", *map(str, sizes)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as feeding:
        assert feeding.stdin is not None
        assert feeding.stdout is not None
        log_key = NoteKey.parse(feeding.stdout.readline().strip())
        with real_witness(folder, log_key) as address:
            output, _ = feeding.communicate(f"{address}\n", timeout=PATIENCE_S)
    return [json.loads(line) for line in output.splitlines()]


async def test_our_witness_signs_their_log_as_it_grows_and_no_fork_of_it(tmp_path: Path) -> None:
    said = await asyncio.to_thread(fed, tmp_path, 3, 7, 7, 300, 5, -300, 400)
    assert [one["size"] for one in said if one.get("cosigned")] == [3, 7, 7, 300, 400]
    refused = {one["size"]: (one["refused"], one["status"]) for one in said if "refused" in one}
    assert refused == {5: ("WitnessAhead", None), -300: ("WitnessRejected", 422)}
