"""Hoarders: a hundred free keys that lease what they get and answer nothing, beside four nodes that work.

- Leases, admission, intake, audits and batches are a coordinator's, on a real store, with the shipped settings.
- Hoarders ask first in every turn: nobody polls faster than they do.
- A turn's work is done by the next turn. All effects share one transaction, since syncs would take the most time.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from coordinator.config import AuditSection, Config
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from tests.coordinator.world import World, answer

SETTINGS = Config()
TURN_MS = 15_000
TIMEOUT_MS = int(1000 * SETTINGS.leases.lease_s(SETTINGS.sampling.max_new_tokens))
TURNS = 20
"""Five times as long as a lease lasts."""

WARM_UP = 4

WORKERS, HOARDERS = 4, 100


class Round(World):
    """A round, who works in it and who hoards."""

    def __init__(self, folder: Path, *, turn_ms: int = TURN_MS, timeout_ms: int = TIMEOUT_MS) -> None:
        self._turn_ms = turn_ms
        self._keys = count(1)
        self._connection: sa.Connection | None = None
        super().__init__(
            folder,
            staleness=SETTINGS.staleness.max_updates,
            size=SETTINGS.learner.groups_per_update,
            groups_per_request=SETTINGS.leases.groups_per_request,
            newcomer_leases=SETTINGS.leases.newcomer_leases,
            rules=AuditSection(),
            budget_micros=10**9,
        )
        self.terms = replace(self.terms, max_owner_share=SETTINGS.audit.max_owner_share, timeout_ms=timeout_ms)
        self.judge = replace(self.judge, terms=self.terms)
        self.publish(1, 0)
        self.version, self.update = 1, 0
        self.workers = list[NodeKey]()
        self.hoarders = list[NodeKey]()
        self.done = dict[NodeKey, int]()
        self._held = dict[NodeKey, tuple[Lease, ...]]()

    def run(self, effect: Any, *arguments: Any, **named: Any) -> Any:
        if self._connection is None:
            return super().run(effect, *arguments, **named)
        return effect(self._connection, *arguments, **named)

    def whole(self, plays: Callable[[], None]) -> None:
        """All that happens meanwhile in one transaction."""

        def effect(connection: sa.Connection) -> None:
            self._connection = connection
            plays()

        self.database.run_now(effect)
        self._connection = None
        self.database.close()

    def enter(self, workers: int, hoarders: int = 0) -> None:
        keys = [self.join(next(self._keys)) for _ in range(workers + hoarders)]
        self.workers += keys[:workers]
        self.hoarders += keys[workers:]

    def play(self, turns: int) -> int:
        """The groups that those who work have done in so many turns."""
        before = sum(self.done.values())
        for _ in range(turns):
            self._turn()
        return sum(self.done.values()) - before

    def _turn(self) -> None:
        self.now_ms += self._turn_ms
        for key in self.hoarders:
            self.offer(key, version=self.version, groups=64)
        for key in self.workers:
            for lease in self._held.get(key, ()):
                self.done[key] = self.done.get(key, 0) + (self.submit(key, answer(key, lease)).outcome == "accepted")
            self._held[key] = self.offer(key, version=self.version, groups=4).leases
        for claim_id in self.take_cases():
            self.find(claim_id, "pass")
        while self.batch(self.update + 1):
            self.update += 1
            self.report(self.update)
            if self.update % SETTINGS.staleness.kappa == 0:
                self.version += 1
                self.publish(self.version, self.update)


def test_a_hundred_hoarders_take_no_more_than_a_quarter_of_the_work_from_four_who_work(tmp_path: Path) -> None:
    done = dict[int, int]()
    for hoarders in (0, HOARDERS):
        world = Round(tmp_path)

        def plays(world: Round = world, hoarders: int = hoarders) -> None:
            world.enter(WORKERS)
            world.play(WARM_UP)
            world.enter(0, hoarders)
            done[hoarders] = world.play(TURNS)

        world.whole(plays)
    assert done[0] >= 3 * WORKERS * TURNS
    assert 4 * done[HOARDERS] >= 3 * done[0]


def test_a_round_of_newcomers_alone_begins_at_full_speed(tmp_path: Path) -> None:
    world = Round(tmp_path)

    def plays() -> None:
        world.enter(20)
        assert world.play(2) == 20 * SETTINGS.leases.newcomer_leases

    world.whole(plays)


def test_newcomers_get_in_beside_hoarders_that_ask_first(tmp_path: Path) -> None:
    world = Round(tmp_path)

    def plays() -> None:
        world.enter(WORKERS)
        world.play(WARM_UP)
        world.enter(0, HOARDERS // 3)
        world.enter(2)
        world.play(2 * TURNS)
        late = [world.done.get(key, 0) for key in world.workers[WORKERS:]]
        assert all(done > WARM_UP for done in late), late

    world.whole(plays)


def test_a_round_that_hoarders_entered_first_is_theirs_for_a_few_leases_time_only(tmp_path: Path) -> None:
    world = Round(tmp_path)

    def plays() -> None:
        world.enter(0, HOARDERS)
        world.enter(WORKERS)
        world.play(2 * TURNS)
        assert world.play(TURNS) >= 3 * WORKERS * TURNS * 3 / 4

    world.whole(plays)
