"""Choice of feeders: nodes that others report as senders, judged by their children; free keys are leaves."""

from collections.abc import Collection, Sequence

import sqlalchemy as sa

from coordinator.rules import topology
from coordinator.rules.topology import NodeLinks, Topology
from coordinator.rules.trust import OwnerStanding
from coordinator.store.tables import uploads
from coordinator.transactions import standings
from coordinator.transactions.feeders import TRIALS_MIN, Feeders
from coordinator.transactions.links import VERSIONS_KEPT
from protocol.ids import NodeId
from protocol.limits import MIB
from tests.coordinator.world import World

SIZE_BYTES = 8 * MIB


class Swarm:
    """Nodes, the plan of the newest version, and what their receipts say."""

    def __init__(self, world: World, count: int) -> None:
        self.world, self.feeders = world, Feeders()
        self.names = [world.join(number).node_id for number in range(1, count + 1)]
        self.version = 0
        self.before: Topology | None = None

    def plan(self) -> set[str]:
        """Plan the next version; who may feed others."""
        before, version = self.before, self.version
        chosen = set(self.world.run(lambda connection: self._choose(connection, before, version)))
        self.version += 1
        self.before = topology.plan(3e6, [NodeLinks(name, 1e6, 1e6) for name in self.names if name in chosen])
        return chosen

    def _choose(self, connection: sa.Connection, before: Topology | None, version: int) -> set[str]:
        return set(self.feeders.choose(connection, self.names, before, version))

    def fetch(self, honest: Collection[str], idle: Collection[str] = ()) -> None:
        """Let honest nodes fetch the version as planned; parents that are idle give nothing, and the seeder does."""
        assert self.before is not None
        for name in honest:
            parents = set(self.before.parents.get(name, [topology.SOURCE])) - {topology.SOURCE, *idle}
            self.receipt(name, [*parents, "seeder"])
        self.feeders.report_served(honest)

    def receipt(self, receiver: str, senders: Sequence[str]) -> None:
        """Store what a receiver says that it had from these."""
        rows = [
            {"version": self.version, "receiver": receiver, "sender": sender, "size_bytes": SIZE_BYTES // len(senders)}
            for sender in senders
        ]
        rest: dict[str, object] = {"busy_s": 1.0, "hindered": False}
        self.world.run(lambda connection: connection.execute(sa.insert(uploads), [row | rest for row in rows]))

    def work(self, name: str) -> None:
        """Have a group of a node's owner found right."""
        self.world.run(standings.count, NodeId(name), 1)
        self.world.run(standings.put, NodeId(name), OwnerStanding(claims=1, groups=1))

    def arrive(self, count: int) -> list[NodeId]:
        """Register more nodes."""
        first = len(self.names) + 1
        late = [self.world.join(number).node_id for number in range(first, first + count)]
        self.names += late
        return late


def test_the_first_version_is_planned_with_everybody(world: World) -> None:
    swarm = Swarm(world, 5)
    assert swarm.plan() == set(swarm.names)


def test_free_keys_that_fetch_nothing_feed_nobody_and_vouch_for_nobody(world: World) -> None:
    swarm = Swarm(world, 4)
    honest = list(swarm.names)
    swarm.plan()
    swarm.fetch(honest)
    keys = swarm.arrive(40)
    for number, key in enumerate(keys):
        swarm.receipt(key, [keys[number - 1], keys[number - 2]])
    for _ in range(3):
        assert swarm.plan() == set(honest)
        swarm.fetch(honest)


def test_free_keys_of_the_first_version_are_out_of_the_second(world: World) -> None:
    """All nodes were planned, as none was proven; the children of free keys had nothing from them."""
    swarm = Swarm(world, 16)
    honest = swarm.names[:4]
    assert swarm.plan() == set(swarm.names)
    swarm.fetch(honest, idle=swarm.names[4:])
    assert swarm.plan() == set(honest)


def test_a_crowd_that_fetches_and_gives_nothing_is_a_few_parents_at_a_time(world: World) -> None:
    swarm = Swarm(world, 8)
    honest = list(swarm.names)
    for _ in range(2):
        swarm.plan()
        swarm.fetch(honest)
    keys = swarm.arrive(100)
    planned_before = set[str]()
    for _ in range(4):
        swarm.feeders.report_served(keys)
        chosen = swarm.plan()
        assert set(honest) <= chosen
        bad = chosen - set(honest)
        assert len(bad) <= max(TRIALS_MIN, len(honest))
        assert not bad & planned_before, "who has failed is a leaf for some versions"
        planned_before |= bad
        swarm.fetch(honest, idle=keys)


def test_a_node_whose_work_was_found_right_is_judged_by_such_alone(world: World) -> None:
    swarm = Swarm(world, 12)
    worker, *keys = swarm.names
    swarm.plan()
    swarm.work(worker)
    swarm.feeders.report_served(swarm.names)
    for key in keys:
        swarm.receipt(key, ["seeder"])  # slander: it gave me nothing
    assert worker in swarm.plan()


def test_where_all_were_slandered_the_plan_is_as_if_nothing_were_known(world: World) -> None:
    swarm = Swarm(world, 12)
    swarm.plan()
    swarm.feeders.report_served(swarm.names)
    for name in swarm.names:
        swarm.receipt(name, ["seeder"])
    assert swarm.plan() == set(swarm.names)


def test_honest_newcomers_are_in_after_they_fetched_once(world: World) -> None:
    swarm = Swarm(world, 8)
    for _ in range(2):
        swarm.plan()
        swarm.fetch(swarm.names)
    late = swarm.arrive(6)
    assert swarm.plan().isdisjoint(late), "nothing is known of them"
    swarm.fetch(swarm.names)
    assert swarm.plan() == set(swarm.names)


def test_a_swarm_of_newcomers_doubles_with_every_version(world: World) -> None:
    swarm = Swarm(world, 8)
    swarm.plan()
    swarm.fetch(swarm.names)
    swarm.arrive(92)
    sizes = []
    for _ in range(5):
        sizes.append(len(swarm.plan()))
        swarm.fetch(swarm.names)
    assert sizes == [8, 16, 32, 64, 100]


def test_who_failed_may_try_again_after_some_versions(world: World) -> None:
    swarm = Swarm(world, 6)
    broken, *others = swarm.names
    swarm.plan()
    swarm.fetch(swarm.names, idle=[broken])
    for _ in range(VERSIONS_KEPT):
        assert swarm.plan() == set(others)
        swarm.fetch(swarm.names)
    assert broken in swarm.plan()


def test_after_a_restart_validated_work_is_proof(world: World) -> None:
    swarm = Swarm(world, 4)
    for name in swarm.names[:2]:
        swarm.work(name)
    assert swarm.plan() == set(swarm.names[:2])


def test_a_version_of_few_chunks_judges_nobody(world: World) -> None:
    """Most parents had nothing to send."""
    swarm = Swarm(world, 6)
    swarm.plan()
    small = 3 * MIB
    rows = [
        {"version": 1, "receiver": name, "sender": "seeder", "size_bytes": small, "busy_s": 1.0, "hindered": False}
        for name in swarm.names
    ]
    world.run(lambda connection: connection.execute(sa.insert(uploads), rows))
    swarm.feeders.report_served(swarm.names)
    assert swarm.plan() == set(swarm.names)
