"""The round under load: a coordinator's process, more that serve beside it on PostgreSQL, and what they have used.

- The learner is this program: it trains when it is told to, and keeps count of what it got.
- Everything that nodes are told is kept, to be compared with the store afterwards (`bench.control.books`).
"""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from bench.control.books import Heard, examine
from bench.control.fleet import Fleet
from bench.control.load import Reply
from coordinator.learner.client import CoordinatorClient
from coordinator.store.state import Database
from protocol.work.learning import UpdateReport
from protocol.work.lease import Lease
from protocol.work.messages import LeaseReply, SubmissionReply, Verdict
from tests.coordinator.policy_files import write_policy
from tests.processes.programs import free_address, script

LOOK_S = 0.1
"""The time between two looks at a process that starts; nothing is measured meanwhile."""

BATCH = 64
SETTINGS = {
    "audit.backlog_max": 1_000_000,  # nobody audits here: the time of an auditor would be counted, too
    "audit.first_groups": 0,  # so what waits for one stays what it would be in a round: one in fifty of the last groups
    "audit.floor": 0.02,
    "audit.trusted_floor": 0.02,
    "audit.escrow_factor": 0,  # else all first claims would be drawn, with nothing in escrow, and wait for ever
    "sampling.samples_per_group": 8,
    "sampling.max_new_tokens": 6,
    "staleness.max_updates": 100_000,
    "staleness.publish_every": 1,
    "learner.groups_per_update": BATCH,
    "leases.timeout_s": 36_000,
    "leases.over_issue": 0,
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
            time.sleep(LOOK_S)  # a log file tells nobody when it grows

    def cpu_s(self) -> float:
        return time.clock_gettime(self._clock)

    def resident_mib(self) -> float:
        return float(self._watched.memory_info().rss) / 2**20

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)


class Round:
    """A round with a published version, its nodes, and so many processes that serve them."""

    def __init__(self, folder: Path, stack: ExitStack, *, size: int, processes: int, store_url: str) -> None:
        place = folder / "round"
        self._store = store_url or place / "state.db"
        self.servers = [_launched(folder, place, store_url)]
        stack.callback(self.servers[0].end)
        for number in range(1, processes):
            address = free_address()
            command = [script("swarm-coordinator"), "api", str(place), "--listen", address, "--quiet"]
            self.servers.append(Server(command, address, folder / f"api-{number}.log"))
            stack.callback(self.servers[-1].end)
        self._learner = CoordinatorClient(f"http://{self.addresses[0]}", (place / "operator.token").read_text())
        policy = folder / "policy"
        write_policy(policy)
        self._learner.publish(1, 0, policy)
        (self.round_id,) = {_knows_version(address) for address in self.addresses}
        self.fleet = Fleet.of(self.round_id, size)
        self._heard = Heard(groups_per_update=BATCH)
        self._updates = 0

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes together, without PostgreSQL's own."""
        return sum(server.cpu_s() for server in self.servers)

    def resident_mib(self) -> float:
        return sum(server.resident_mib() for server in self.servers)

    def train(self) -> int:
        """Make one update of the learner; return its number of groups."""
        self._updates += 1
        batch = self._learner.batch(self._updates)
        self._heard.trained += [group.claim_id for group in batch.groups]
        self._learner.report(UpdateReport(number=self._updates, mismatched=(), metrics={}, idle_s=0.0, busy_s=0.0))
        return len(batch.groups)

    def train_all(self) -> None:
        """Leave no more groups than are too few for a batch."""
        accepted = sum(verdict.outcome == "accepted" for verdict in self._heard.verdicts)
        for _ in range((accepted - len(self._heard.trained)) // BATCH):
            self.train()

    def leased(self, replies: Sequence[Reply]) -> list[Lease]:
        """Return a lease for each node."""
        leases = [lease for reply in replies for lease in LeaseReply.from_bytes(reply.body).leases]
        assert len(leases) == len(self.fleet.keys), "not every node got a lease"
        names = [lease.lease_id for lease in leases]
        self._heard.leases += zip((key.node_id for key in self.fleet.keys), names, strict=True)
        return leases

    def judged(self, replies: Sequence[Reply]) -> list[Verdict]:
        """Return the verdicts on the submissions."""
        verdicts = [verdict for reply in replies for verdict in SubmissionReply.from_bytes(reply.body).verdicts]
        self._heard.verdicts += verdicts
        return verdicts

    def examine(self) -> dict[str, list[str]]:
        """Return violated invariants of the store by their names; no request may be in progress."""
        database = Database(self._store)
        try:
            return database.run_now(examine, self._heard)
        finally:
            database.close()


def _launched(folder: Path, place: Path, store_url: str) -> Server:
    """The process that leads."""
    address = free_address()
    places = {"round.directory": place, "round.listen": address, "round.seeder": free_address(), "store.url": store_url}
    config = folder / "round.toml"
    config.write_text("")
    chosen = [part for name, value in (SETTINGS | places).items() for part in ("--set", f"{name}={value}")]
    alone = ("--no-learner", "--no-auditor", "--quiet")
    command = [script("swarm-coordinator"), "launch", str(config), *alone, *chosen]
    return Server(command, address, folder / "coordinator.log")


def _knows_version(address: str) -> str:
    """Wait until a process has heard of the first version; its round."""
    deadline = time.monotonic() + 60
    while (status := httpx.get(f"http://{address}/v1/status").json())["version"] < 1:
        assert time.monotonic() < deadline, f"{address} never heard of the version"
        time.sleep(LOOK_S)  # the page of figures tells nobody when it changes
    return str(status["round_id"])


@contextmanager
def counted(cpu_s: Callable[[], float], spent_s: list[float]) -> Iterator[None]:
    """Note what processors take meanwhile."""
    before = cpu_s()
    yield
    spent_s.append(cpu_s() - before)
