"""Machines in networks of their own that join as the documents say: each can be dialled, and feeds the others."""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from bench.broadcast import net
from bench.broadcast.cells import Link
from bench.broadcast.net import Net
from tests.processes.programs import Program, Swarm, script, until
from tests.processes.rounds import NO_AUDITS, Coordinator, Settings, node_id_of, operator_of

pytestmark = pytest.mark.processes

SETTINGS: Settings = {
    "round": {"max_updates": 1000},
    "publish": {"chunk_size_bytes": 16384, "patches": False},
    "learner": {"groups_per_update": 512},
    "staleness": {"max_updates": 200},
    "audit": NO_AUDITS,
}
"""No patches: a version has enough chunks for everybody to feed somebody."""

GIGABIT = Link(1e9, 1e9)
VERSIONS_MAX = 12
"""Versions within which both must have fed each other: a first plan knows no uplink, and small versions end soon."""

PARTIES = ("coordinator", "first", "second", "silent")


class Machines:
    """A coordinator and nodes, each in a network of its own; every command is one of the documents'."""

    def __init__(self, net: Net, swarm: Swarm) -> None:
        self._net, self._swarm = net, swarm

    def node(self, party: str, command: str, join_string: str, *options: str) -> Program:
        words = [script("swarm-node"), command, join_string, "--home", str(self._swarm.folder / party), "--json"]
        words += ["--name", party, *options]
        return self._swarm.start(party, *self._net.command(party, words))

    def said(self, party: str, *words: str) -> str:
        """Run a command on a node's machine; return its output."""
        program = self._swarm.start(f"{party}-{words[0]}", *self._net.command(party, [script("swarm-node"), *words]))
        program.process.wait(timeout=90)
        return program.output

    def listening_ports(self, party: str) -> set[int]:
        """TCP ports of a node that other machines can reach: the owner's page is on loopback alone."""
        tables = self._swarm.start(
            f"{party}-tables", *self._net.command(party, ["cat", "/proc/net/tcp", "/proc/net/tcp6"])
        )
        tables.process.wait(timeout=90)
        rows = [line.split() for line in tables.output.splitlines()]
        listens = [row[1].split(":") for row in rows if len(row) > 3 and row[3] == "0A"]
        return {int(port, 16) for address, port in listens if address != LOOPBACK}


LOOPBACK = "0100007F"
"""127.0.0.1 in the kernel's tables."""


def asked(coordinator: Coordinator, question: str, **values: str) -> Sequence[sa.Row[tuple[object, ...]]]:
    with coordinator.copy_of_store() as connection:
        return connection.execute(sa.text(question), values).all()


def addresses(coordinator: Coordinator, node: str) -> list[str]:
    """Return the addresses at which others are asked to dial a node."""
    rows = asked(coordinator, "SELECT addresses FROM nodes WHERE node_id = :node", node=node)
    registered: list[str] = json.loads(str(rows[0][0])) if rows else []
    return registered


def words_on(coordinator: Coordinator, node: str) -> set[bool]:
    """Return the reports of the nodes that tried to dial a node."""
    return {bool(row[0]) for row in asked(coordinator, "SELECT answered FROM dials WHERE node = :node", node=node)}


def has_receipts(coordinator: Coordinator, version: str, count: int) -> bool:
    rows = asked(coordinator, "SELECT receiver FROM receipts WHERE version = :version", version=version)
    return len(rows) == count


def uploaded(coordinator: Coordinator, sender: str, receiver: str) -> int:
    """Bytes that one says, signed, the other has sent it."""
    question = "SELECT COALESCE(SUM(size_bytes), 0) FROM uploads WHERE sender = :sender AND receiver = :receiver"
    return int(str(asked(coordinator, question, sender=sender, receiver=receiver)[0][0]))


def changed(policy: Path, target: Path, number: int) -> Path:
    """The policy with the last bits of its weights changed, otherwise for each number: no chunk of them is known."""
    shutil.copytree(policy, target)
    weights = target / "model.safetensors"
    data = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start::4] = bytes(byte ^ number for byte in data[start::4])
    weights.write_bytes(data)
    return target


def run(network: Net, swarm: Swarm, policy: Path) -> None:
    """Start a round in the coordinator's network."""
    machines = Machines(network, swarm)
    coordinator = Coordinator(swarm, SETTINGS, host=network.address("coordinator")).start()
    operator = operator_of(swarm, coordinator, policy)
    operator.publish()
    first = machines.node("first", "join", coordinator.join_string, "--threads", "1")
    second = machines.node("second", "mirror", coordinator.join_string)
    silent = machines.node("silent", "mirror", coordinator.join_string, "--no-share")
    first_id, other, third = map(node_id_of, (first, second, silent))
    coordinator.reaches("nodes", 3)

    assert addresses(coordinator, first_id) == [f"{network.address('first')}:8703"]
    assert addresses(coordinator, other) == [f"{network.address('second')}:8703"]
    assert addresses(coordinator, third) == []
    assert [machines.listening_ports(party) for party in PARTIES[1:]] == [{8703}, {8703}, set()]
    for node in (first, second):
        said = r"Other nodes can fetch chunks on all interfaces, .*TCP port 8703: .*--no-share turns this off"
        node.said(said)
    silent.said(r"This node opens no port")

    fed = False
    for number in range(1, 1 + VERSIONS_MAX):
        operator.policy = changed(policy, swarm.folder / f"weights-{number}", number)
        version = str(operator.publish())
        until("all three to say who sent them the version", partial(has_receipts, coordinator, version, 3))
        sent = uploaded(coordinator, first_id, other), uploaded(coordinator, other, first_id)
        if all(sent) and words_on(coordinator, first_id) == words_on(coordinator, other) == {True}:
            fed = True
            break
    assert fed, "both were to be dialled and to feed each other"
    operator.publish()
    second.said("others can connect to you")

    def status() -> bool:
        return bool(
            json.loads(machines.said("first", "status", "--home", str(swarm.folder / "first"), "--json"))["dialled"]
        )

    until("the node's status to say so", status)
    doctor = ("doctor", coordinator.join_string, "--home", str(swarm.folder / "first"), "--no-engines")
    assert "Others can connect to you." in machines.said("first", *doctor)
    alone = ("doctor", coordinator.join_string, "--home", str(swarm.folder / "elsewhere"), "--no-engines")
    assert "The coordinator can connect to this machine." in machines.said("silent", *alone), (
        "no agent runs in this home"
    )
    assert uploaded(coordinator, third, first_id) == uploaded(coordinator, third, other) == 0
    for node in (first, second, silent):
        assert "Traceback" not in node.log


def test_nodes_that_join_as_documented_are_dialled_and_feed_each_other(swarm: Swarm, large_policy: Path) -> None:
    if reason := net.obstacle():
        pytest.skip(reason)
    with Net(dict.fromkeys(PARTIES, GIGABIT)) as network:
        network.call("coordinator", lambda: run(network, swarm, large_policy))
