"""Real programs behind real NATs: routers and firewalls of nftables, in network namespaces.

Each mirror has a router or firewall of its own; some can be dialled. Who fed whom is read from the receipts.
"""

import sqlite3
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from bench.broadcast.cells import MBIT, Link
from bench.broadcast.contender import SOURCE, make_payload
from bench.broadcast.nat import Nat
from bench.broadcast.net import Net, obstacle
from bench.broadcast.ours import Ours
from tests.processes.programs import until, words_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(obstacle(nat=True)), reason=obstacle(nat=True) or "there is no obstacle"),
]

FAST = Link(50 * MBIT, 50 * MBIT)
SIZE_BYTES = 1 << 20
LAP_S = 90.0
VERSIONS_MAX = 40
"""Versions until it is known who cannot be dialled: a dial into a NAT ends after ten seconds, as a receipt says."""


class Lab:
    """A round whose mirrors are behind NATs, and what its receipts say."""

    def __init__(self, folder: Path, net: Net) -> None:
        self._folder, self.net = folder, net
        self.behind = [party for party in net.parties if not net.is_dialable(party)]
        self.ours = Ours(net, folder, warm_up_bytes=SIZE_BYTES)
        self.ours.start()

    def publish(self) -> None:
        """Bring one more version to every mirror."""
        payload = make_payload(self._folder / f"payload-{self.ours.newest}", SIZE_BYTES)
        assert self.ours.broadcast(payload, within_s=LAP_S).bad_bytes == 0

    def asked(self, query: str, *values: object) -> list[tuple[object, ...]]:
        """Rows of the coordinator's store."""
        store = self._folder / "round" / "state.db"
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
            return connection.execute(query, values).fetchall()

    def fed(self) -> set[tuple[str, str]]:
        """Return pairs of sender and receiver that the receipts of the last versions name."""
        query = """
            SELECT DISTINCT sent.name, got.name FROM uploads
            JOIN nodes AS sent ON sent.node_id = sender JOIN nodes AS got ON got.node_id = receiver
        """
        return {(str(sender), str(receiver)) for sender, receiver in self.asked(query)}

    def receipts(self) -> int:
        """Return the number of mirrors that sent a receipt for the newest version."""
        return int(str(self.asked("SELECT COUNT(*) FROM receipts WHERE version = ?", self.ours.newest)[0][0]))

    def publish_until_fed(self, pairs: set[tuple[str, str]]) -> None:
        """Publish until all of these pairs have fed each other."""
        fed: set[tuple[str, str]] = set()
        for _ in range(VERSIONS_MAX):
            self.publish()
            until("all receipts", lambda: self.receipts() == len(self.net.parties) - 1)
            fed |= self.fed()
            if pairs <= fed:
                return
        pytest.fail(f"not within {VERSIONS_MAX} versions: {sorted(pairs - fed)}\n{self.logs()}")

    def logs(self) -> str:
        paths = sorted((self._folder / "logs").glob("*.log"))
        return "\n".join(f"{path.stem}: {path.read_text()[-1500:]}" for path in paths)


@contextmanager
def lab(folder: Path, *kinds: Nat, dialable: int = 0) -> Iterator[Lab]:
    """Mirrors `w1`, `w2`, … behind these kinds, and then as many that can be dialled."""
    behind = {f"w{at}": kind for at, kind in enumerate(kinds, 1)}
    open_ones = [f"w{len(kinds) + at}" for at in range(1, dialable + 1)]
    with Net(dict.fromkeys([SOURCE, *behind, *open_ones], FAST), behind) as net:
        running = Lab(folder, net)
        try:
            yield running
        finally:
            running.ours.close()


def pairs_of(first: Collection[str], second: Collection[str]) -> set[tuple[str, str]]:
    """Return all pairs of a node of each set, in both directions."""
    both = {(sender, other) for sender in first for other in second if sender != other}
    return both | {(other, sender) for sender, other in both}


def test_nodes_that_nobody_can_dial_feed_each_other_through_holes_whatever_kind_of_nat_each_has(tmp_path: Path) -> None:
    kinds: list[Nat] = ["cone", "restricted", "firewall"]
    with lab(tmp_path, *kinds, *kinds) as scene:
        scene.publish_until_fed(pairs_of(scene.behind, scene.behind))


@pytest.mark.slow
def test_behind_a_symmetric_nat_a_node_is_fed_by_those_that_can_be_dialled_and_never_through_a_hole(
    tmp_path: Path,
) -> None:
    with lab(tmp_path, "symmetric", "symmetric", "cone", "restricted", "firewall", dialable=1) as scene:
        symmetric, punchable = scene.behind[:2], scene.behind[2:]
        scene.publish_until_fed(pairs_of(punchable, punchable) | {("w6", name) for name in symmetric})
        # A full cone lets anybody in, so a dial to it may work where only one observer was there to tell of an address.
        closed = [name for name in scene.behind if name != "w3"]
        assert scene.fed().isdisjoint(pairs_of(symmetric, closed))


@pytest.mark.slow
def test_a_version_reaches_two_symmetric_nats_through_a_third_when_the_seeder_is_killed(tmp_path: Path) -> None:
    with lab(tmp_path, "symmetric", "symmetric", dialable=1) as scene:
        scene.publish_until_fed({("w3", "w1"), ("w3", "w2")})
        payload = make_payload(tmp_path / "last", 8 * SIZE_BYTES)
        began_at_s = scene.ours.publish(payload)
        seeders = [program for program in psutil.process_iter() if is_seeder_of(program, tmp_path)]
        assert seeders, "no seeder was found"
        for seeder in seeders:
            seeder.kill()
        assert scene.ours.outcome(payload, began_at_s, ["w1", "w2", "w3"], within_s=LAP_S).bad_bytes == 0
        until("all receipts", lambda: scene.receipts() == 3)
        assert scene.fed().isdisjoint(pairs_of(scene.behind, scene.behind))


def is_seeder_of(process: psutil.Process, folder: Path) -> bool:
    words = words_of(process)
    return "seed" in words and any(word.startswith(str(folder)) for word in words)
