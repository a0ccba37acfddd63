"""The control plane: processor time of a signed request, memory, and life past saturation.

- A real coordinator process on its own SQLite, with every node registered; requests come over loopback, from this
  process, whose own time is not counted.
- The rivals are two handlers of the same server library that get the very same bodies and answer with as many bytes
  (`bench.control.bare`): one that only reads, what HTTP costs anyhow, and one that decodes and checks signatures, too,
  the floor for whoever believes nobody. All take turns, kind by kind.
- Past saturation more connections ask at once than the coordinator lets wait, and none of them honours Retry-After;
  beside them the learner fetches batch after batch.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median

import httpx
import psutil

from bench.control.fleet import Fleet, Prepared
from bench.control.load import Reply, drive
from bench.harness import Bench, quick_from_environment
from coordinator.learner.client import CoordinatorClient
from protocol.learning import Report
from protocol.messages import LeaseReply, SubmissionReply
from tests.coordinator.policy_files import write_policy
from tests.processes.programs import free_address, script

CONNECTIONS = 64
FLOOD_CONNECTIONS = 400
RIVALS = ("bare", "checked")
BATCH = 64
SIGNED_AT_ONCE = 1_000
"""Requests: what was signed too long ago is refused."""

FLOODING = 2_500
"""Nodes whose heartbeats, twice, are the flood."""

SETTINGS = {
    "audit.backlog_max": 1_000_000,  # nobody audits here: the time of an auditor would be counted, too
    "audit.first_groups": 0,  # so what waits for one stays what it would be in a round: one in fifty of the last groups
    "audit.floor": 0.02,
    "audit.trusted_floor": 0.02,
    "sampling.samples_per_group": 8,
    "sampling.max_new_tokens": 6,
    "staleness.max_updates": 100_000,
    "staleness.publish_every": 1,
    "learner.groups_per_update": BATCH,
    "leases.timeout_s": 36_000,
}


class Server:
    """A server process, and what it has used."""

    def __init__(self, command: list[str], address: str, log: Path) -> None:
        self.address = address
        with log.open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out)
        self._watched = psutil.Process(self._process.pid)
        self._clock = ~self._process.pid << 3 | 2
        """Linux's number for the clock of its processor time, in ns; psutil's goes by hundredths of a second."""
        deadline = time.monotonic() + 120
        while True:
            with suppress(httpx.TransportError):
                httpx.get(f"http://{address}/healthz")
                return
            assert time.monotonic() < deadline, log.read_text()
            assert self._process.poll() is None, log.read_text()
            time.sleep(0.1)

    def cpu_s(self) -> float:
        return time.clock_gettime(self._clock)

    def resident_mib(self) -> float:
        return float(self._watched.memory_info().rss) / 2**20

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)


class Round:
    """A coordinator with a published version, as its operator sees it."""

    def __init__(self, folder: Path, stack: ExitStack, size: int) -> None:
        policy, address = folder / "policy", free_address()
        place = {"round.directory": folder / "round", "round.listen": address, "round.seeder": free_address()}
        settings = SETTINGS | place
        config = folder / "round.toml"
        config.write_text("")
        chosen = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        alone = ("--no-learner", "--no-auditor", "--quiet")
        command = [script("swarm-coordinator"), "launch", str(config), *alone, *chosen]
        self.server = Server(command, address, folder / "coordinator.log")
        stack.callback(self.server.end)
        self.learner = CoordinatorClient(f"http://{address}", (folder / "round" / "operator.token").read_text())
        write_policy(policy)
        self.learner.publish(1, 0, policy)
        self._trained = 0
        self.round_id = httpx.get(f"http://{address}/v1/status").json()["round_id"]
        self.fleet = Fleet.of(self.round_id, size)

    def train(self) -> int:
        """One update of the learner; how many groups it got."""
        self._trained += 1
        batch = self.learner.batch(self._trained)
        self.learner.report(Report(number=self._trained, mismatched=(), metrics={}, idle_s=0.0, busy_s=0.0))
        return len(batch.groups)


@contextmanager
def counted(server: Server, spent_s: list[float]) -> Iterator[None]:
    """Note what the server's processor takes meanwhile."""
    before = server.cpu_s()
    yield
    spent_s.append(server.cpu_s() - before)


def compare(bench: Bench, kind: str, here: Round, rivals: Server, say: Callable[[Fleet], Prepared]) -> list[Reply]:
    """The same bodies of all nodes to the coordinator and to both rivals, in turn."""
    replies, ours = list[Reply](), list[float]()
    theirs: dict[str, list[float]] = {rival: [] for rival in RIVALS}
    for part in here.fleet.parts(SIGNED_AT_ONCE):
        prepared = say(part)
        with counted(here.server, ours):
            heard = asyncio.run(drive(here.server.address, prepared, connections=CONNECTIONS))
        wrong = [reply for reply in heard if reply.status != 200]
        assert not wrong, (kind, len(wrong), wrong[0])
        size = int(median(len(reply.body) for reply in heard))
        for rival, spent_s in theirs.items():
            same = [(f"/{rival}{path}?reply={size}", body) for path, body in prepared]
            with counted(rivals, spent_s):
                answers = asyncio.run(drive(rivals.address, same, connections=CONNECTIONS))
            assert all(answer.status == 200 for answer in answers), answers[0]
        replies += heard
    for case, spent_s in {kind: ours, **{f"{kind}, {rival}": spent_s for rival, spent_s in theirs.items()}}.items():
        each_us = sum(spent_s) / len(replies) * 1e6
        bench.measure(case, each_us, unit="µs of processor")
        print(f"{case}: {each_us:.0f} µs", flush=True)
    return replies


def measure_requests(bench: Bench, here: Round, rivals: Server, rounds: int) -> None:
    resident = list[float]()
    for _ in range(rounds):
        if resident:  # else ever more groups would wait, which no round lets happen
            for _ in range(len(here.fleet.keys) // BATCH):
                here.train()
        compare(bench, "heartbeat", here, rivals, Fleet.heartbeats)
        offered = compare(bench, "lease", here, rivals, Fleet.lease_requests)
        leases = [one for reply in offered for one in LeaseReply.from_bytes(reply.body).leases]
        assert len(leases) == len(here.fleet.keys), "not every node got a lease"
        judged = compare(bench, "submission", here, rivals, partial(Fleet.submissions, leases=leases))
        verdicts = [one for reply in judged for one in SubmissionReply.from_bytes(reply.body).verdicts]
        assert {verdict.outcome for verdict in verdicts} == {"accepted"}
        resident.append(here.server.resident_mib())
        bench.measure("resident memory", resident[-1], unit="MiB")
    for kind in ("heartbeat", "lease", "submission"):
        bench.ratio(f"{kind} / the floor", kind, f"{kind}, checked")
        ratio = bench.ratio(f"{kind} / bare handler", kind, f"{kind}, bare")
        bench.goal(f"a {kind} costs at most twice a bare handler", ratio, at_most=2.0)
    bench.goal("memory is flat: the last round's / the first's", resident[-1] / resident[0], at_most=1.1)


async def flood(here: Round, prepared: Prepared, batches: int) -> tuple[list[Reply], list[float], float]:
    """Everything at once, and the learner beside it: replies, seconds for each batch, and seconds for all."""
    learner_s: list[float] = []

    def train() -> None:
        for _ in range(batches):
            started = time.perf_counter()
            assert here.train() == BATCH
            learner_s.append(time.perf_counter() - started)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        learning = group.create_task(asyncio.to_thread(train))
        replies = await drive(here.server.address, prepared, connections=FLOOD_CONNECTIONS)
        took_s = time.perf_counter() - started
        await learning
    return replies, learner_s, took_s


def measure_saturation(bench: Bench, here: Round, batches: int) -> None:
    few = next(here.fleet.parts(FLOODING))
    calm = few.heartbeats()
    started = time.perf_counter()
    asyncio.run(drive(here.server.address, calm, connections=CONNECTIONS))
    calm_rate = len(calm) / (time.perf_counter() - started)
    replies, learner_s, took_s = asyncio.run(flood(here, few.heartbeats() + few.heartbeats(), batches))
    served = [reply for reply in replies if reply.status == 200]
    refused = [reply for reply in replies if reply.status != 200]
    bench.measure("heartbeats answered, calm", calm_rate, unit="/s")
    bench.measure("heartbeats answered, flooded", len(served) / took_s, unit="/s")
    bench.measure("refused", len(refused) / len(replies), unit="of all")
    for reply in served:
        bench.measure("answer, flooded", reply.seconds, unit="s")
    for seconds in learner_s:
        bench.measure("batch and report of the learner, flooded", seconds, unit="s")
    bench.check("some are refused", bool(refused))
    bench.check("all of them with 503 and Retry-After", all(one.status == 503 and one.retry_after for one in refused))
    bench.check("the learner got every batch", len(learner_s) == batches)
    waits = bench.median("batch and report of the learner, flooded") / bench.median("answer, flooded")
    bench.goal("two requests of the learner, by one answer to a node", waits, at_most=2.0)


def main() -> int:
    """Measure, print and judge."""
    quick = quick_from_environment()
    nodes, rounds = (500, 3) if quick else (10_000, 3)
    batches = 5 if quick else 20
    inputs = {"nodes": nodes, "rounds": rounds, "connections": CONNECTIONS, "flood_connections": FLOOD_CONNECTIONS}
    bench = Bench("control", inputs=inputs, quick=quick)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, address = Path(name), free_address()
        here = Round(folder, stack, nodes)
        command = [sys.executable, "-P", "-m", "bench.control.bare", address.rpartition(":")[2], here.round_id]
        rivals = Server(command, address, folder / "rivals.log")
        stack.callback(rivals.end)
        compare(bench, "registration", here, rivals, Fleet.registrations)
        measure_requests(bench, here, rivals, rounds)
        measure_saturation(bench, here, batches)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
