"""Contender "ours": a launched coordinator with its seeder at the source, and a mirror at every worker.

- The bench plays the learner over its HTTP API, from the source's own place: uploads do not cross a capped link.
- The round is warm, as a round is after its first minutes: a version of 16 MiB goes before those that are timed.
- Behind NAT it takes some versions more, until all know who cannot be dialled, and the holes are punched.
- `share=False` is the star: every mirror fetches from the seeder alone.
- Time runs from the moment at which the coordinator records the version as published.
"""

import json
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import httpx

from bench.broadcast.contender import PAYLOAD, SOURCE, Outcome, bad_bytes, make_payload, workers_of
from bench.broadcast.net import Net
from bench.broadcast.program import START_S, Line, Program, module, script
from coordinator.learner.client import CoordinatorClient
from swarm_node.p2p.host import HostSettings

PORTS = {True: (8700, 8701, 4001), False: (8710, 8711, 4011)}
"""The ports of API, seeder and mirrors; the star runs beside the swarm."""

WARM_UP_BYTES = 16 << 20

PUNCHED_AFTER = 5
"""Versions: one whose receipts say who cannot be dialled, one for observers, one with holes, and two that measure."""

LOOK_S = 0.5
"""The time between two looks at who has registered; no lap has begun then."""

SOURCES = ("from_peers", "from_seeder", "from_http")


class Ours:
    """The shipped programs."""

    def __init__(
        self, net: Net, folder: Path, *, share: bool = True, corrupter: str = "", warm_up_bytes: int = WARM_UP_BYTES
    ) -> None:
        self.name = "ours" if share else "ours, star"
        self._net, self._folder, self._share = net, folder, share
        self._api_port, self._seeder_port, self._node_port = PORTS[share]
        self._corrupter = corrupter
        """The worker that runs a mirror which can be told to lie."""
        self._warm_up_bytes = warm_up_bytes
        self._workers = workers_of(net)
        self._mirrors: dict[str, Program] = {}
        self._coordinator: Program | None = None
        self._join_string = ""
        self.newest = 0
        """The version that was published last."""

    def start(self) -> None:
        config = self._folder / "round.toml"
        self._folder.mkdir(parents=True, exist_ok=True)
        config.write_text(self._settings())
        command = [script("swarm-coordinator"), "launch", str(config), "--no-learner"]
        self._coordinator = Program(self._net, SOURCE, command, self._folder / "coordinator.log")
        said = self._coordinator.heard("the join string", lambda line: "swarm-node join" in line.get("text", ""))
        self._join_string = said["text"].split()[-1]
        for worker in self._workers:
            self.start_mirror(worker)
        self._wait_for_all()
        warm_up = make_payload(self._folder / "warm-up", self._warm_up_bytes)
        self.broadcast(warm_up, within_s=START_S)
        if not all(map(self._net.is_dialable, self._workers)):
            time.sleep(HostSettings.dial_s)  # dials of the first version, which no receipt has named yet
            for number in range(PUNCHED_AFTER):
                settling = make_payload(self._folder / f"settle-{number}", self._warm_up_bytes // 4)
                self.broadcast(settling, within_s=START_S)

    def _wait_for_all(self) -> None:
        """Wait until all nodes are alive: only these have a part in the plan of a version and are measured."""
        deadline = time.monotonic() + START_S
        url = f"http://{self._net.address(SOURCE)}:{self._api_port}/v1/status"
        while self._net.call(SOURCE, lambda: httpx.get(url).json()["nodes_alive"]) < len(self._workers):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all mirrors have registered in {START_S:.0f} s")
            time.sleep(LOOK_S)  # the page of figures tells nobody when it changes

    def start_mirror(self, worker: str, *, home: str = "") -> Program:
        """Start a worker's mirror, with a new identity if a new home is named."""
        program = module("corrupter") if worker == self._corrupter else [script("swarm-node"), "mirror"]
        listen = f"{self._net.listen_host(worker)}:{self._node_port}"
        options = ["--home", str(self._home(home or worker)), "--name", worker, "--listen", listen, "--json"]
        options += [] if self._share else ["--no-share"]
        log = self._folder / "logs" / f"{worker}.log"
        self._mirrors[worker] = Program(self._net, worker, [*program, self._join_string, *options], log)
        return self._mirrors[worker]

    def mirror(self, worker: str) -> Program:
        return self._mirrors[worker]

    def broadcast(self, payload: Path, *, within_s: float, among: list[str] | None = None) -> Outcome:
        """Publish the payload as the next version; `among` names those that are waited for, by default all."""
        began_at_s = self.publish(payload)
        return self.outcome(payload, began_at_s, self._workers if among is None else among, within_s=within_s)

    def publish(self, payload: Path) -> float:
        """Publish the next version; the Unix time at which the coordinator recorded it."""
        self.newest += 1
        self._net.call(SOURCE, lambda: self._publish(payload))
        store = self._folder / "round" / "state.db"
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
            asked = "SELECT published_ms FROM versions WHERE version = ?"
            (published_ms,) = connection.execute(asked, (self.newest,)).fetchone()
        return float(published_ms) / 1000

    def outcome(self, payload: Path, began_at_s: float, among: list[str], *, within_s: float) -> Outcome:
        """Return the times that the mirrors report for the newest version, after a check of its files."""
        lines = {worker: self.held(worker, within_s=within_s) for worker in among}
        moved: Counter[str] = Counter()
        for line in lines.values():
            moved.update({source: line[source] for source in SOURCES})
        return Outcome(
            began_at_s=began_at_s,
            seconds={worker: line["at_s"] - began_at_s for worker, line in lines.items()},
            bad_bytes=sum(bad_bytes(Path(line["folder"]) / PAYLOAD, payload) for line in lines.values()),
            bytes_from=moved,
        )

    def held(self, worker: str, *, within_s: float = START_S) -> Line:
        """Return a mirror's report that it holds the newest version."""
        newest = self.newest
        return self._mirrors[worker].heard(
            f"version {newest}", lambda line: line.get("version") == newest, within_s=within_s
        )

    def close(self) -> None:
        for mirror in self._mirrors.values():  # all at once: leaving takes each a moment
            mirror.signal(signal.SIGINT)
        for mirror in self._mirrors.values():
            mirror.end()
        if self._coordinator is not None:
            self._coordinator.end()

    def _publish(self, payload: Path) -> None:
        token = (self._folder / "round" / "operator.token").read_text()
        client = CoordinatorClient(f"http://{self._net.address(SOURCE)}:{self._api_port}", token)
        with closing(client._http):
            client.publish(self.newest, self.newest - 1, payload.parent)

    def _home(self, name: str) -> Path:
        return self._folder / "homes" / name

    def _settings(self) -> str:
        address = self._net.address(SOURCE)
        place = {
            "directory": str(self._folder / "round"),
            "listen": f"{address}:{self._api_port}",
            "seeder": f"{address}:{self._seeder_port}",
        }
        return "[round]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in place.items())
