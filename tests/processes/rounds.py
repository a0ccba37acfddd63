"""A coordinator as a process that can be killed and started again, its operator, and real nodes.

- The configuration, the folder and both ports stay the same over every restart, as an operator would keep them.
- State is read from the public API, or from a consistent copy of the store: the copy can be examined at leisure.
"""

import json
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import sqlalchemy as sa

from coordinator.learner.client import CoordinatorClient
from ledger import store
from protocol.work.lease import OPEN
from tests.processes.programs import PATIENCE_S, Program, Swarm, free_address, script, until
from tests.safetensors_files import file_of

Settings = Mapping[str, Mapping[str, Any]]


WHOLE_VERSIONS: Settings = {
    "round": {"max_updates": 1000},
    "staleness": {"max_updates": 4},
    "leases": {"heartbeat_s": 2.0},  # who misses three is no part of a broadcast; one that is stopped here must be
    "publish": {"chunk_size_bytes": 1024, "patches": False},
}
"""Settings for a test that follows versions on their way: many chunks each, no patches, and news of them at once."""

NOBODY_LEARNS: Settings = {"learner": {"groups_per_update": 512}, "staleness": {"max_updates": 200}}
"""Settings under which there is work for longer than any test looks, however fast the machine."""

NO_AUDITS = {"first_groups": 0, "floor": 0.0, "trusted_floor": 0.0}
"""A test that is about something else needs no auditor to be paid."""


class Coordinator:
    """A round's coordinator and its files on the disk."""

    def __init__(self, swarm: Swarm, settings: Settings, *, host: str = "127.0.0.1", name: str = "round") -> None:
        self._swarm = swarm
        self.folder = swarm.folder / name
        self.address = free_address(host)
        self.url = f"http://{self.address}"
        self.config_file = swarm.folder / f"{name}.toml"
        place = {"directory": str(self.folder), "listen": self.address, "seeder": free_address(host)}
        everything = {"audit": NO_AUDITS, **settings, "round": {**settings.get("round", {}), **place}}
        self.config_file.write_text(_toml(everything))
        self.join_string = ""
        self.http = httpx.Client(base_url=self.url, timeout=30)
        swarm.at_end(self.http.close)
        self._program: Program | None = None

    @property
    def program(self) -> Program:
        """The newest start."""
        assert self._program, "it was never started"
        return self._program

    def start(self, *, learner: bool = False, auditor: bool = False, preflight: bool = False) -> "Coordinator":
        """Launch, and wait for the line that people copy; a `preflight` takes five CPU seconds."""
        chosen = {"learner": learner, "auditor": auditor, "preflight": preflight}
        options = [f"--{name}" if on else f"--no-{name}" for name, on in chosen.items()]
        command = [script("swarm-coordinator"), "launch", str(self.config_file), *options]
        program = "coordinator" if self.folder.name == "round" else f"coordinator of {self.folder.name}"
        self._program = self._swarm.start(program, *command)
        self.join_string = self._program.said(r"swarm-node join (\S+)$")[1]
        return self

    def init(self) -> "Coordinator":
        """Make keys and store without starting anything."""
        program = self._swarm.start("init", script("swarm-coordinator"), "init", str(self.config_file))
        assert program.process.wait(timeout=PATIENCE_S) == 0, program.log
        self.join_string = program.output.strip()
        return self

    def status(self) -> dict[str, Any]:
        return self.fresh("/v1/status")

    def fresh(self, path: str) -> dict[str, Any]:
        """Return the coordinator's current answer, not one that it computed for an earlier request."""
        asked_ms = time.time_ns() // 1_000_000

        def look() -> dict[str, Any]:
            answer: dict[str, Any] = self.http.get(path).raise_for_status().json()
            return answer if answer["as_of_ms"] >= asked_ms else {}

        return until(f"{path} anew", look)

    def reaches(self, what: str, least: int) -> None:
        """Wait until the status counts so far; a coordinator that is away for a moment is waited for."""

        def look() -> int:
            try:
                return int(self.status()[what])
            except httpx.TransportError:
                return -1

        until(f"the round's {what} to reach {least}", lambda: look() >= least)

    def accepted_groups(self) -> int:
        return int(self.status()["rollouts"]["groups"])

    def leases(self) -> dict[str, int]:
        """Return the number of leases in each state."""
        counts: dict[str, int] = self.status()["leases"]
        return counts

    def open_leases(self) -> int:
        leases = self.leases()
        return sum(leases.get(state, 0) for state in OPEN)

    def leases_of(self, node_id: str) -> dict[str, str]:
        """Lease id → state, of one node."""
        with self.copy_of_store() as connection:
            rows = connection.execute(
                sa.text("SELECT lease_id, state FROM leases WHERE node_id = :node"), {"node": node_id}
            )
            return dict(map(tuple, rows))

    def leaderboard(self) -> dict[str, dict[str, Any]]:
        """The rows by node id."""
        rows = self.fresh("/v1/leaderboard")["nodes"]
        return {row["node_id"]: row for row in rows}

    @contextmanager
    def copy_of_store(self) -> Iterator[sa.Connection]:
        """A consistent copy of the store, whether the coordinator runs or not."""
        copy = self._swarm.folder / "copy.db"
        source = sqlite3.connect(f"file:{self.folder / 'state.db'}?mode=ro", uri=True)
        target = sqlite3.connect(copy)
        try:
            source.backup(target)
        finally:
            source.close()
            target.close()
        engine = sa.create_engine(f"sqlite:///{copy}")
        try:
            with engine.connect() as connection:
                yield connection
        finally:
            engine.dispose()
            copy.unlink()


class Operator:
    """The operator's hands: publishes versions and plays the learner."""

    def __init__(self, coordinator: Coordinator, policy: Path) -> None:
        token = (coordinator.folder / "operator.token").read_text()
        self.client = CoordinatorClient(coordinator.url, token)
        self.policy = policy

    def close(self) -> None:
        self.client._http.close()

    def publish(self, update: int = 0) -> int:
        """Publish the policy folder as the next version; its number."""
        version = self.client.state().newest_version + 1
        self.client.publish(version, update, self.policy)
        return version


def operator_of(swarm: Swarm, coordinator: Coordinator, policy: Path) -> Operator:
    """The operator of a running coordinator, closed with the swarm."""
    operator = Operator(coordinator, policy)
    swarm.at_end(operator.close)
    return operator


def join(
    swarm: Swarm, name: str, join_string: str, *options: str, home: Path | None = None, before: Sequence[str] = ()
) -> Program:
    """Start a real node, one of several on this machine; `before` stands before its command, such as `env A=b`."""
    home = home or swarm.folder / name
    command = [script("swarm-node"), "join", join_string, "--home", str(home), "--name", name, "--threads", "1"]
    return swarm.start(name, *before, *command, *options, "--json")


def mirror(swarm: Swarm, name: str, join_string: str, *options: str) -> Program:
    """Start a mirror."""
    home = str(swarm.folder / name)
    command = [script("swarm-node"), "mirror", join_string, "--home", home, "--name", name, "--json"]
    return swarm.start(name, *command, *options)


def held(program: Program, version: int) -> dict[str, int | float | str]:
    """Return a mirror's report that it holds a version."""

    def look() -> dict[str, int | float | str] | None:
        said = [json.loads(line) for line in program.output.splitlines()]
        return next((line for line in said if line["version"] == version), None)

    report = until(f"{program.name} to hold version {version}", look)
    assert report
    return report


def node_id_of(node: Program) -> str:
    """Return the id of a real node, from its first log line."""
    return node.said(r"node started id=(\S+)")[1]


def other_weights(policy: Path, target: Path, mask: int = 1) -> Path:
    """Write the policy with every weight's last bits changed by a mask: no chunk of the weights is the same."""
    shutil.copytree(policy, target)
    weights = target / "model.safetensors"
    data = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start::4] = bytes(byte ^ mask for byte in data[start::4])
    weights.write_bytes(data)
    return target


def random_weights(folder: Path, *, seed: int, size_bytes: int) -> Path:
    """A policy that is nothing but weights, like no other."""
    folder.mkdir()
    data = Random(seed).randbytes(size_bytes)
    (folder / "model.safetensors").write_bytes(file_of({"weights": ("BF16", data)}))
    return folder


def blobs_of(swarm: Swarm, program: Program) -> dict[str, int]:
    """The chunks that a mirror has stored, and their sizes."""
    blobs = {}
    for path in (swarm.folder / program.name).glob("**/blobs/??/*"):
        with suppress(FileNotFoundError):  # pruned since the folder was listed
            blobs[path.name] = path.stat().st_size
    return blobs


def assert_ledger_is_sound(coordinator: Coordinator) -> None:
    """Entries, balances and claims tell one story: every accepted rollout, and each part of one, has its one claim."""
    columns = "SELECT claim_id, node_id, tokens, credit_micros FROM"
    with coordinator.copy_of_store() as connection:
        assert store.rebuild(connection) == []
        rollouts = connection.execute(sa.text(f"{columns} rollouts UNION {columns} parts"))
        claims = connection.execute(sa.text("SELECT claim_id, node_id, tokens, amount_micros FROM ledger_claims"))
        assert sorted(map(tuple, rollouts)) == sorted(map(tuple, claims))


def _toml(settings: Settings) -> str:
    return "\n".join(
        f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        for section, keys in settings.items()
    )


def outbox_of(home: Path) -> dict[str, bytes]:
    """Lease id → signed rollout, of what a node has not been answered for yet."""
    unsent = {}
    for path in home.glob("rounds/*/outbox/*.rollout"):
        with suppress(FileNotFoundError):  # answered since the folder was listed
            unsent[path.stem] = path.read_bytes()
    return unsent
