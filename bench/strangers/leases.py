"""Lease hoarding: the learner's updates in a second while free keys lease and never answer, against those without them.

- The coordinator is a real process with the shipped admission, shares and newcomers' budget; leases last for `LEASE_S`.
- Honest nodes and attackers are requests over loopback (`bench.strangers.nodes`). Honest ones sample so fast that all
  together give `GROUPS_PER_S`, however many they are. The learner takes `TRAIN_S` for an update.
- Attackers come when every honest node is proven. What is measured begins a lease's time later.
- At many addresses each attacker calls from another one of 127.0.0.0/8. To the coordinator all of these are its own
  machine, where one address may stand for many callers: no budget of a neighbourhood holds anybody back.
"""

import argparse
import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from bench.control.round import Server
from bench.strangers.cells import KINDS, Cell, Kind, Row, cells
from bench.strangers.nodes import Node, hoard, hoard_once, work
from coordinator.learner.client import CoordinatorClient
from protocol.work.learning import UpdateReport
from tests.coordinator.policy_files import write_policy
from tests.processes.programs import free_address, script

LEASE_S = 10.0
TRAIN_S = 0.2
BATCH = 8
KAPPA = 3
"""Updates in a version."""

HANDS = 16
"""Groups that all honest nodes together sample at once."""

GROUPS_PER_S = 20.0
MEASURED_S, MEASURED_QUICK_S = 30.0, 12.0
WARM_UP_UPDATES = 12
PATIENCE_S = 120.0
LOOK_S = 0.1

SETTINGS = {
    "audit.first_groups": 0,  # nobody audits here: who was trained on is proven
    "audit.floor": 0,
    "audit.trusted_floor": 0,
    "sampling.samples_per_group": 8,
    "sampling.max_new_tokens": 6,
    "staleness.max_updates": 4,
    "staleness.publish_every": KAPPA,
    "publish.patches": "false",
    "learner.groups_per_update": BATCH,
    "leases.timeout_s": LEASE_S,
}

GOAL = 0.9


class Learner(threading.Thread):
    """Takes batches at its pace, and publishes every third update."""

    def __init__(self, client: CoordinatorClient, folder: Path) -> None:
        super().__init__(daemon=True)
        self._client, self._folder = client, folder
        self.updates = 0
        self._ends = threading.Event()

    def run(self) -> None:
        try:
            self._train()
        except RuntimeError:  # its client is closed, while it waits for a batch
            if not self._ends.is_set():
                raise

    def _train(self) -> None:
        while not self._ends.is_set():
            self._client.batch(self.updates + 1)
            self.updates += 1
            self._ends.wait(TRAIN_S)  # the pace is played
            self._client.report(UpdateReport(number=self.updates, mismatched=(), metrics={}, idle_s=0.0, busy_s=0.0))
            if self.updates % KAPPA == 0:
                write_policy(self._folder, weights=b"%d" % self.updates)
                self._client.publish(1 + self.updates // KAPPA, self.updates, self._folder)

    def end(self) -> None:
        """Take no more batches."""
        self._ends.set()


def rows(options: argparse.Namespace, *, quick: bool) -> Iterator[Row]:
    """Each cell, as many times as it is asked for."""
    measured_s = MEASURED_QUICK_S if quick else MEASURED_S
    usual: list[Kind] = ["new-20"] if quick else list(KINDS)
    kinds = [kind for kind in KINDS if kind in options.kinds] if options.kinds else usual
    for _ in range(options.rounds):
        for cell in cells(options.honest, kinds, options.addresses):
            undisturbed, attacked = play(cell, measured_s)
            yield Row(f"updates: {cell.name}", undisturbed, attacked, "/s", at_least=GOAL)


def play(cell: Cell, measured_s: float) -> tuple[float, float]:
    """The updates in a second of one round before attackers come, and while they are there."""
    with TemporaryDirectory() as scratch, _round(Path(scratch)) as (address, round_id, learner):
        return asyncio.run(_play(cell, address, round_id, learner, measured_s))


async def _play(cell: Cell, address: str, round_id: str, learner: Learner, measured_s: float) -> tuple[float, float]:
    async with asyncio.TaskGroup() as group:
        hands = max(1, HANDS // cell.honest)
        pace_s = hands * cell.honest / GROUPS_PER_S
        tasks = [group.create_task(work(Node(address, round_id), hands, pace_s)) for _ in range(cell.honest)]
        deadline = time.monotonic() + PATIENCE_S
        while learner.updates < WARM_UP_UPDATES:
            assert time.monotonic() < deadline, f"{cell.name}: {learner.updates} updates in {PATIENCE_S:g} s"
            await asyncio.sleep(LOOK_S)  # a learner tells nobody how far it is
        undisturbed = await _rate(learner, measured_s)
        tasks.append(group.create_task(_attack(cell, address, round_id)))
        await asyncio.sleep(LEASE_S)
        attacked = await _rate(learner, measured_s)
        for task in tasks:
            task.cancel()
    return undisturbed, attacked


async def _attack(cell: Cell, address: str, round_id: str) -> None:
    keys, keys_per_s = KINDS[cell.kind]
    count = 0

    def attacker() -> Node:
        nonlocal count
        count += 1
        local = f"127.0.{1 + count // 250 % 250}.{1 + count % 250}" if cell.addresses == "many" else "127.0.0.1"
        return Node(address, round_id, local)

    async with asyncio.TaskGroup() as group:
        for _ in range(keys):
            group.create_task(hoard(attacker()))
        while keys_per_s:
            group.create_task(hoard_once(attacker()))
            await asyncio.sleep(1 / keys_per_s)  # the pace of the attack


async def _rate(learner: Learner, seconds: float) -> float:
    began, before = time.monotonic(), learner.updates
    await asyncio.sleep(seconds)
    return (learner.updates - before) / (time.monotonic() - began)


@contextmanager
def _round(folder: Path) -> Iterator[tuple[str, str, Learner]]:
    """A coordinator with a published version and its learner: where it listens, its round's id, and the learner."""
    with ExitStack() as stack:
        place, address, config = folder / "round", free_address(), folder / "round.toml"
        config.write_text("")
        chosen = {"round.directory": place, "round.listen": address, "round.seeder": free_address(), **SETTINGS}
        words = [part for name, value in chosen.items() for part in ("--set", f"{name}={value}")]
        alone = ("--no-learner", "--no-auditor", "--quiet")
        command = [script("swarm-coordinator"), "launch", str(config), *alone, *words]
        server = Server(command, address, folder / "coordinator.log")
        stack.callback(server.end)
        client = CoordinatorClient(f"http://{address}", (place / "operator.token").read_text())
        stack.callback(client.close)
        policy = folder / "policy"
        write_policy(policy)
        client.publish(1, 0, policy)
        learner = Learner(client, policy)
        stack.callback(learner.end)
        learner.start()
        yield address, str(httpx.get(f"http://{address}/v1/status").json()["round_id"]), learner
