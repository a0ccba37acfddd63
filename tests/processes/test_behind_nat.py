"""Real programs behind real NATs: routers and firewalls of nftables, in network namespaces.

Two mirrors are behind the kinds of a case, beside the coordinator with its seeder and, where a case says so, a mirror
that can be dialled. Whether two fed each other is read from the receipts.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from bench.broadcast.cells import MBIT, Link
from bench.broadcast.contender import SOURCE, make_payload
from bench.broadcast.nat import Nat
from bench.broadcast.net import Net, obstacle
from bench.broadcast.ours import Ours
from tests.processes.programs import until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(obstacle(nat=True)), reason=obstacle(nat=True) or "there is no obstacle"),
]

FAST = Link(50 * MBIT, 50 * MBIT)
SIZE_BYTES = 1 << 20
LAP_S = 90.0
VERSIONS_MAX = 40
"""To find out who cannot be dialled: a dial into a NAT is given up after ten seconds, and the next receipt says so."""


class Lab:
    """A round whose mirrors are behind NATs, and what its receipts say."""

    def __init__(self, folder: Path, net: Net) -> None:
        self._folder, self.net = folder, net
        self.ours = Ours(net, folder)
        self.ours.start()
        self.version = 1

    def publish(self) -> None:
        """Bring one more version to every mirror."""
        self.version += 1
        payload = make_payload(self._folder / f"payload-{self.version}", SIZE_BYTES)
        assert self.ours.broadcast(payload, within_s=LAP_S).bad_bytes == 0

    def asked(self, query: str, *values: object) -> list[tuple[object, ...]]:
        """Rows of the coordinator's store."""
        store = self._folder / "round" / "state.db"
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
            return connection.execute(query, values).fetchall()

    def fed(self, sender: str, receiver: str) -> int:
        """Bytes of the newest version that a mirror has from another one, by its receipt."""
        query = """
            SELECT COALESCE(SUM(size_bytes), 0) FROM uploads WHERE version = ?
            AND sender = (SELECT node_id FROM nodes WHERE name = ?)
            AND receiver = (SELECT node_id FROM nodes WHERE name = ?)
        """
        return int(str(self.asked(query, self.version, sender, receiver)[0][0]))

    def receipts(self) -> int:
        """How many mirrors have said where the newest version came from."""
        return int(str(self.asked("SELECT COUNT(*) FROM receipts WHERE version = ?", self.version)[0][0]))

    def unreachable(self) -> set[object]:
        """Mirrors of which somebody said that it could not be dialled."""
        query = "SELECT DISTINCT name FROM dials JOIN nodes ON node_id = node WHERE NOT answered"
        return {name for (name,) in self.asked(query)}

    def publish_until(self, what: str, *, most: int, holds: object) -> None:
        """Publish until something holds that takes some versions to find out."""
        assert callable(holds)
        for _ in range(most):
            self.publish()
            until("all receipts", lambda: self.receipts() == len(self.net.parties) - 1)
            if holds():
                return
        pytest.fail(f"{what}: not within {most} versions\n" + self.logs())

    def logs(self) -> str:
        paths = sorted((self._folder / "logs").glob("*.log"))
        return "\n".join(f"{path.stem}: {path.read_text()[-1500:]}" for path in paths)


@contextmanager
def lab(folder: Path, *kinds: Nat, dialable: int = 0) -> Iterator[Lab]:
    """Mirrors `w1` and `w2` behind these kinds, and then as many that can be dialled."""
    behind = {f"w{at}": kind for at, kind in enumerate(kinds, 1)}
    open_ones = [f"w{len(kinds) + at}" for at in range(1, dialable + 1)]
    with Net(dict.fromkeys([SOURCE, *behind, *open_ones], FAST), behind) as net:
        running = Lab(folder, net)
        try:
            yield running
        finally:
            running.ours.close()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("restricted", "restricted"),
        ("cone", "restricted"),
        ("cone", "cone"),
        ("firewall", "restricted"),
        ("firewall", "firewall"),
    ],
)
def test_two_that_nobody_can_dial_feed_each_other_through_a_hole(tmp_path: Path, first: Nat, second: Nat) -> None:
    with lab(tmp_path, first, second) as here:
        here.publish_until(
            "w1 and w2 feed each other", most=VERSIONS_MAX, holds=lambda: here.fed("w1", "w2") and here.fed("w2", "w1")
        )


@pytest.mark.parametrize("other", ["symmetric", "restricted"])
def test_behind_a_symmetric_nat_a_node_is_fed_by_others_and_never_by_a_hole(tmp_path: Path, other: Nat) -> None:
    with lab(tmp_path, "symmetric", other, dialable=1) as here:
        here.publish_until(
            "w3 feeds both", most=VERSIONS_MAX, holds=lambda: here.fed("w3", "w1") and here.fed("w3", "w2")
        )
        for _ in range(3):
            here.publish()
            until("all receipts", lambda: here.receipts() == 3)
            assert not here.fed("w1", "w2")
            assert not here.fed("w2", "w1")
        assert "punched" not in here.logs()


def test_a_version_reaches_two_symmetric_nats_through_a_third_when_the_seeder_is_killed(tmp_path: Path) -> None:
    with lab(tmp_path, "symmetric", "symmetric", dialable=1) as here:
        here.publish_until(
            "w3 feeds both", most=VERSIONS_MAX, holds=lambda: here.fed("w3", "w1") and here.fed("w3", "w2")
        )
        here.version += 1
        payload = make_payload(tmp_path / "last", 8 * SIZE_BYTES)
        began_at_s = here.ours.publish(payload)
        seeders = [one for one in psutil.process_iter(["cmdline"]) if is_seeder_of(one, tmp_path)]
        assert seeders, "no seeder was found"
        for seeder in seeders:
            seeder.kill()
        assert here.ours.outcome(payload, began_at_s, ["w1", "w2", "w3"], within_s=LAP_S).bad_bytes == 0
        until("all receipts", lambda: here.receipts() == 3)
        assert not here.fed("w1", "w2")
        assert not here.fed("w2", "w1")


def is_seeder_of(process: psutil.Process, folder: Path) -> bool:
    words = " ".join(process.info["cmdline"] or ())
    return str(folder) in words and "seed" in words.replace(str(folder), "")
