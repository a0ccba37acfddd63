"""The provable ledger: entries into a store, a whole log verified, one proof out of a large tree.

- Stores: batches of pending credits and their posts, each batch one durable transaction, into SQLite (WAL, FULL) and a
  PostgreSQL with fsync, both as the coordinator opens them; in turn with the same bytes put into one bare table of
  SQLite, the least that any log costs.
- The whole log is verified from public files in memory as `swarm-node ledger verify` does it over a network.
- A proof is made from tiles that nobody has read yet, out of a tree of generated hashes; its rival is the hashing alone
  that any tree of tiles asks for.
- What counts processor time says so: it is that of this process, on a machine that others use, too.
"""

import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import sha256
from itertools import count
from pathlib import Path

import trio

from bench.harness import Bench, no_options, quick_from_environment
from coordinator.publishing.signed_metadata import SignedMetadata, utc_now
from coordinator.store.state import Database
from ledger import store, tiles, tree
from ledger.book import EntryOutcome
from ledger.checkpoint import Checkpoint, ledger_key, sign
from ledger.entry import Deposit, Entry, Pending, Post, amount
from ledger.tiles import TILE_HASHES, Tile
from ledger.tree import HASH_BYTES, Hash, leaf_hash
from ledger.witness import Witnesses
from protocol import ids
from swarm_node.ledger import log_verify
from swarm_node.ledger.log_reader import LogReader
from tests.ledger import postgres

PRICE, TOKENS, NODES = 1_000_000, 2_000, 200


def entries(first: int, pairs: int) -> list[Entry]:
    """Credits of many nodes, each posted."""
    made: list[Entry] = []
    for number in range(first, first + pairs):
        claim_id = sha256(number.to_bytes(8)).hexdigest()
        made.append(
            Pending(
                claim_id=claim_id,
                lease_id=claim_id[:32],
                node_id=ids.node_id((number % NODES).to_bytes(32)),
                tokens=TOKENS,
                price_micros_per_mtok=PRICE,
                amount_micros=amount(TOKENS, PRICE),
            )
        )
        made.append(Post(claim_id=claim_id))
    return made


class Appending:
    """A store that takes batch after batch."""

    def __init__(self, database: Database, batch: int) -> None:
        self._database = database
        self._batches = (entries(first, batch // 2) for first in count(0, batch // 2))
        database.run_now(store.append, Deposit(reference="bench", amount_micros=10**15), 0)

    def rate(self, batches: int) -> tuple[float, float]:
        """Entries per second, and per second of this process's processor time."""
        waiting = [next(self._batches) for _ in range(batches)]
        started, cpu = time.perf_counter(), time.process_time()
        for batch in waiting:
            outcomes = self._database.run_now(store.append_all, batch, 0)
            assert set(outcomes) == {EntryOutcome.APPLIED}
        total = sum(map(len, waiting))
        return total / (time.perf_counter() - started), total / (time.process_time() - cpu)


def bare_rate(connection: sqlite3.Connection, first: int, batches: int, batch: int) -> float:
    """Write the same number of bytes into one table without an index, and return the rate."""
    waiting = [[(entry.body,) for entry in entries(first + n * batch, batch // 2)] for n in range(batches)]
    started = time.perf_counter()
    for rows in waiting:
        with connection:
            connection.executemany("INSERT INTO bare VALUES (?)", rows)
    return sum(map(len, waiting)) / (time.perf_counter() - started)


def measure_stores(bench: Bench, folder: Path, stack: ExitStack, rounds: int, batches: int, batch: int) -> None:
    sqlite = Appending(Database(folder / "ledger.sqlite"), batch)
    bare = sqlite3.connect(folder / "bare.sqlite")
    for line in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "CREATE TABLE bare (body BLOB)"):
        bare.execute(line)
    server = None
    if not postgres.missing():
        server = Appending(Database(stack.enter_context(postgres.cluster(durable=True))), batch)
    for number in range(rounds):
        wall, cpu = sqlite.rate(batches)
        bench.measure("SQLite", wall, unit="entries/s")
        bench.measure("SQLite, by processor time", cpu, unit="entries/s")
        bench.measure("a bare table", bare_rate(bare, number * batches * batch, batches, batch), unit="entries/s")
        if server:
            bench.measure("PostgreSQL", server.rate(batches)[0], unit="entries/s")
    bare.close()
    bench.ratio("SQLite / a bare table", "SQLite", "a bare table")
    bench.goal("SQLite takes 20,000 entries a second", bench.median("SQLite"), at_least=20_000)
    if server:
        bench.goal("PostgreSQL takes 5,000 entries a second", bench.median("PostgreSQL"), at_least=5_000)


class Memory:
    """A round's public files."""

    def __init__(self, folder: Path, size: int) -> None:
        metadata = SignedMetadata.create(folder / "keys", folder / "metadata", 3600.0, utc_now())
        self.round_id = metadata.round_id
        bodies = [Deposit(reference="bench", amount_micros=10**15).body]
        bodies += [entry.body for entry in entries(0, size // 2)][: size - 1]
        self._files = {"metadata/1.root.json": metadata.roots()[0]}
        for number in range(-(-size // TILE_HASHES)):
            part = bodies[number * TILE_HASHES : (number + 1) * TILE_HASHES]
            self._files[f"ledger/tile/{tiles.tile_of(Tile.BUNDLE, number, size).name}"] = tiles.bundle(part)
        key = ledger_key(self.round_id, metadata.ledger_public())
        root = tree_of([leaf_hash(body) for body in bodies]).root(size)
        self._files["ledger/checkpoint"] = sign(Checkpoint(key.name, size, root), key, metadata.sign_for_ledger)
        # The leaderboard of the beginning, when nothing was earned yet.
        self._files["leaderboard"] = json.dumps({"ledger_size": 1, "nodes": []}).encode()

    async def file(self, path: str, max_bytes: int) -> bytes | None:
        return self._files.get(path)


class Tree:
    """Tiles in memory."""

    def __init__(self) -> None:
        self.size = 0
        self._kept: dict[tuple[int, int], bytes] = {}

    def add(self, leaves: list[Hash]) -> None:
        for tile, data in tiles.grown(self.size, leaves, self.read):
            self._kept[tile.level, tile.number] = data
        self.size += len(leaves)

    def root(self, size: int) -> Hash:
        return tree.root(size, tiles.hashes_in(size, self.read))

    def read(self, tile: Tile) -> bytes:
        return self._kept[tile.level, tile.number][: tile.width * HASH_BYTES]


def tree_of(leaves: list[Hash]) -> Tree:
    made = Tree()
    made.add(leaves)
    return made


def generated(size: int) -> Tree:
    made, step = Tree(), 1 << 18
    while made.size < size:
        data = os.urandom(min(step, size - made.size) * HASH_BYTES)
        made.add([Hash(data[place : place + HASH_BYTES]) for place in range(0, len(data), HASH_BYTES)])
    return made


def spread(size: int, proofs: int) -> Iterator[int]:
    """Places all over a log."""
    return (number * size // proofs for number in range(proofs))


def measure_proofs(bench: Bench, large: Tree, rounds: int) -> None:
    proofs, hashes = 100, 3 * TILE_HASHES
    for _ in range(rounds):
        started = time.process_time()
        for index in spread(large.size, proofs):
            tree.prove(tree.inclusion_ranges(index, large.size), tiles.hashes_in(large.size, large.read))
        bench.measure("an inclusion proof", (time.process_time() - started) / proofs * 1e3, unit="ms of processor")
        started = time.process_time()
        for _ in range(proofs):
            for _ in range(hashes):
                sha256(bytes(65)).digest()
        bench.measure("its hashes alone", (time.process_time() - started) / proofs * 1e3, unit="ms of processor")
    bench.ratio("a proof / its hashes alone", "an inclusion proof", "its hashes alone")
    bench.goal(f"a proof in {large.size:,} entries takes 2 ms", bench.median("an inclusion proof"), at_most=2.0)


def measure_verification(bench: Bench, folder: Path, size: int, rounds: int) -> None:
    files = Memory(folder, size)
    for _ in range(rounds):
        started, cpu = time.perf_counter(), time.process_time()
        verified = trio.run(log_verify.verify, LogReader(files), files.round_id, Witnesses(), lambda _done, _all: None)
        assert verified.entries == size
        bench.measure("the whole log", time.perf_counter() - started, unit="s")
        bench.measure("the whole log, processor time", time.process_time() - cpu, unit="s")
    cpu_s = bench.median("the whole log, processor time")
    bench.goal(f"{size:,} entries verified in 60 s of processor time", cpu_s, at_most=60.0)


def main() -> int:
    """Measure, print and judge."""
    no_options(__doc__)
    quick = quick_from_environment()
    rounds, batches, batch = (3, 2, 1_000) if quick else (5, 10, 1_000)
    log_size, tree_size = (20_000, 100_000) if quick else (1_000_000, 10_000_000)
    inputs = {"rounds": rounds, "batches": batches, "batch": batch, "log": log_size, "tree": tree_size}
    bench = Bench("ledger", inputs=inputs, quick=quick)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        measure_stores(bench, Path(name), stack, rounds, batches, batch)
        measure_proofs(bench, generated(tree_size), rounds)
        measure_verification(bench, Path(name), log_size, 3)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
