"""The leaderboard of ten thousand nodes, asked for two hundred times a second while nodes go on reporting.

- The shipped coordinator runs as its own process, on a store with so many nodes, each with validated credit; somebody
  listens to its events, so the figures are computed anew all the time.
- Requests come by the clock, whether the answers do or not; what is counted is the time until the first byte is there.
- The rival is the least that aiohttp can do: the same compressed bytes as a static file, from a process of its own.
- Nodes' signed heartbeats, each a transaction, come all the while; they are measured alone, too.
- Client and both servers share the machine: where it is busy, only the ratios and the processor time say something.
"""

import asyncio
import math
import secrets
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from itertools import count
from pathlib import Path

import aiohttp
import psutil
import sqlalchemy as sa

from bench.harness import Bench, no_options, quick_from_environment
from coordinator.base.children import script
from coordinator.base.clock import now_ms
from coordinator.config import load
from coordinator.service.round import Round
from coordinator.store.tables import nodes
from ledger import store
from ledger.entry import Deposit, Entry, Pending, Post, amount
from protocol import limits
from protocol.wire.signing import NodeKey
from protocol.work.messages import Heartbeat, Transfer, seal_request

NODES, RATE, BEATS = 10_000, 200, 20
"""Nodes on the board, pages a second, heartbeats a second."""

TOKENS, PRICE = 2_000, 1_000_000
LISTEN, STATIC = "127.0.0.1:8791", "127.0.0.1:8792"

STATIC_SERVER = """
import sys
from aiohttp import web
app = web.Application()
app.router.add_static("/", sys.argv[1])
web.run_app(app, host="127.0.0.1", port=8792, access_log=None, print=lambda *_: print("up", flush=True))
"""


def fill(folder: Path, members: int) -> tuple[str, list[NodeKey]]:
    """A round with so many nodes, each with one validated claim; its id and some keys."""
    round_ = Round(load(None, [f"round.directory={folder}", "round.seed=1"]))
    keys = [NodeKey(number.to_bytes(32)) for number in range(1, members + 1)]

    def write(connection: sa.Connection) -> None:
        moment_ms = now_ms()
        rows = [
            {"node_id": key.node_id, "owner": key.node_id, "name": f"node {number}", "price_micros_per_mtok": PRICE,
             "addresses": [], "shares": True, "registered_ms": moment_ms, "last_seen_ms": moment_ms, "phase": "idle"}
            for number, key in enumerate(keys)
        ]  # fmt: skip
        connection.execute(sa.insert(nodes), rows)
        entries: list[Entry] = [Deposit(reference="bench", amount_micros=10**12)]
        for number, key in enumerate(keys):
            claim = sha256(number.to_bytes(8)).hexdigest()
            tokens = TOKENS + number
            entries.append(
                Pending(claim_id=claim, lease_id=claim[:32], node_id=key.node_id, tokens=tokens,
                        price_micros_per_mtok=PRICE, amount_micros=amount(tokens, PRICE))
            )  # fmt: skip
            entries.append(Post(claim_id=claim))
        for start in range(0, len(entries), 2_000):
            store.append_all(connection, entries[start : start + 2_000], moment_ms)

    round_.database.run_now(write)
    round_.close()
    return round_.round_id, keys[:100]


@asynccontextmanager
async def running(*command: str, ready: str) -> AsyncIterator[Process]:
    """A server, from its first line that says it is up to its end."""
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=sys.stderr)
    assert process.stdout
    try:
        while ready not in (line := (await process.stdout.readline()).decode()):
            assert line, f"{command[0]} did not start"
        yield process
    finally:
        process.terminate()
        await process.wait()


async def by_the_clock(rate: float, seconds: float, ask: Callable[[], Awaitable[float]]) -> list[float]:
    """Call `ask` at a fixed rate per second; return each duration in milliseconds from its scheduled time."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def one(due: float) -> float:
        late = loop.time() - due
        return (await ask() + late) * 1e3

    async with asyncio.TaskGroup() as group:
        tasks = []
        for number in range(int(rate * seconds)):
            due = began + number / rate
            await asyncio.sleep(max(0.0, due - loop.time()))
            tasks.append(group.create_task(one(due)))
    return [task.result() for task in tasks]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.floor(share * len(values)))]


def cpu_s(process: Process) -> float:
    """The processor time that a server has had."""
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


class Load:
    """The requests of visitors and nodes."""

    def __init__(self, client: aiohttp.ClientSession, round_id: str, keys: list[NodeKey]) -> None:
        self._client = client
        self._round_id = round_id
        self._keys = keys
        self._numbers = count()

    async def first_byte(self, url: str) -> float:
        started = time.perf_counter()
        async with self._client.get(url, headers={"Accept-Encoding": "gzip"}) as response:
            await response.content.readany()
            took = time.perf_counter() - started
            assert response.status == 200
            await response.read()
        return took

    async def beat(self) -> float:
        key = self._keys[next(self._numbers) % len(self._keys)]
        moved = Transfer(from_peers=0, from_seeder=0, from_http=0, to_peers=0)
        message = Heartbeat(
            session="0" * 16, version=0, phase="idle", tokens_per_s=1.0, transfer=moved, blames=(), reached=()
        )
        nonce = secrets.token_bytes(limits.NONCE_BYTES)
        path = "/v1/heartbeat"
        body = seal_request(key, round_id=self._round_id, path=path, nonce=nonce, now_ms=now_ms(), body=message)
        started = time.perf_counter()
        async with self._client.post(f"http://{LISTEN}{path}", data=body) as response:
            await response.read()
            assert response.status == 200
        return time.perf_counter() - started


async def measure(bench: Bench, folder: Path, members: int, rounds: int, seconds: float) -> None:
    round_id, keys = fill(folder / "round", members)
    settings = [f"round.directory={folder / 'round'}", "round.seed=1", f"round.listen={LISTEN}"]
    settings.append("round.seeder=127.0.0.1:8793")
    config = folder / "round.toml"
    config.touch()
    chosen = [part for setting in settings for part in ("--set", setting)]
    launch = [script("swarm-coordinator"), "launch", str(config), "--no-learner", "--quiet", *chosen]
    public = folder / "public"
    public.mkdir()
    timeout = aiohttp.ClientTimeout(total=None)  # on a busy machine the answers are late, not lost
    async with (
        running(*launch, ready="Join with") as coordinator,
        running(sys.executable, "-P", "-c", STATIC_SERVER, str(public), ready="up") as server,
        aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as client,
        client.get(f"http://{LISTEN}/v1/events"),
    ):
        page, static = f"http://{LISTEN}/", f"http://{STATIC}/page.html"
        async with client.get(page, headers={"Accept-Encoding": "gzip"}) as response:
            (public / "page.html").write_bytes(await response.read())
        load = Load(client, round_id, keys)
        for _ in range(rounds):
            alone = await by_the_clock(BEATS, seconds, load.beat)
            before_s = cpu_s(coordinator)
            async with asyncio.TaskGroup() as group:
                pages = group.create_task(by_the_clock(RATE, seconds, lambda: load.first_byte(page)))
                beats = group.create_task(by_the_clock(BEATS, seconds, load.beat))
            page_s, static_s = cpu_s(coordinator) - before_s, cpu_s(server)
            files = await by_the_clock(RATE, seconds, lambda: load.first_byte(static))
            # All that the coordinator did meanwhile is put on the pages' account, figures and heartbeats, too.
            bench.measure("page, processor", 1e3 * page_s / len(files), unit="ms")
            bench.measure("static file, processor", 1e3 * (cpu_s(server) - static_s) / len(files), unit="ms")
            for case, values in (
                ("page", pages.result()), ("static file", files), ("heartbeat meanwhile", beats.result()),
                ("heartbeat alone", alone),
            ):  # fmt: skip
                bench.measure(f"{case}, median", percentile(values, 0.5), unit="ms")
                bench.measure(f"{case}, p99", percentile(values, 0.99), unit="ms")


def main() -> int:
    """Measure, print and judge."""
    no_options(__doc__)
    quick = quick_from_environment()
    members, rounds, seconds = (1_000, 3, 2.0) if quick else (NODES, 3, 5.0)
    inputs = {"nodes": members, "rounds": rounds, "seconds": seconds, "pages_per_s": RATE, "heartbeats_per_s": BEATS}
    bench = Bench("web", inputs=inputs, quick=quick)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(bench, Path(folder), members, rounds, seconds))
    bench.ratio("page / static file, median", "page, median", "static file, median")
    cost = bench.ratio("page / static file, processor", "page, processor", "static file, processor")
    bench.goal("a page costs at most twice what a static file does", cost, at_most=2.0)
    bench.ratio("heartbeat meanwhile / alone, median", "heartbeat meanwhile, median", "heartbeat alone, median")
    bench.goal("half of the pages begin within 100 ms", bench.median("page, median"), at_most=100.0)
    bench.goal("99 of 100 pages begin within 100 ms", bench.median("page, p99"), at_most=100.0)
    bench.goal("two hundred pages a second take half a core", bench.median("page, processor"), at_most=2.5)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
