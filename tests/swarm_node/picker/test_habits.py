"""Sources with habits, played in virtual time: while one of them is honest, every chunk comes, and soon.

- A seed draws it all: how many chunks, who is there and with which habit, and the plans that follow one another.
- The honest source is in every plan, holds everything and answers within a moment. It is a peer, the seeder or the
  origin; the others do what strangers can do, and may be left out of any plan unless they owe something.
- However they behave: nobody is asked for what is here, for what it owes already, or for more than its window.
- The picker hears what a download would tell it, and decides when a download would let it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from random import Random

from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id
from protocol.wire.frames import Reason
from swarm_node.picker.picker import Ask, Picker
from swarm_node.picker.sources import ChunkSource, PlanPace
from tests.swarm_node.picker_world import HTTP, RULES, SEEDER, STRIPES, picker_for

SEEDS = 4000
SIZES = (1, 2, 5, 12, 40)
"""Chunks: the last one alone, more than a window, more than all windows."""
PEERS_MAX = 4
ENDS_S = 240.0
"""The end where only the origin is honest: it is asked for two chunks each time patience has run out, 80 s for 40."""

REFUSALS = {"absent": Reason.ABSENT, "boasts": Reason.ABSENT, "busy": Reason.BUSY}
FAILURES = {"fails": Picker.failed, "parts": Picker.parted, "lies": Picker.lied, "silent": Picker.failed}
HABITS = ("honest", "honest", "slow", *REFUSALS, *FAILURES)
ORIGIN_HABITS = ("honest", "slow", "busy")
"""All that a download makes of its answers."""
USUAL_S, SLOW_S, SILENCE_S = 0.3, 6.0, 60.0


@dataclass(eq=False)
class Player:
    """One source, what it does, and what it was asked for."""

    source: ChunkSource
    habit: str
    holds: list[ChunkId]
    """Chunks that it says it holds; of these, who is honest has all, and who is absent or boasts none."""
    owes: dict[ChunkId, object] = field(default_factory=dict)
    """Each with a mark of this WANT, since the same chunk may be asked for again."""

    @property
    def name(self) -> str:
        return self.source.name

    def wants_max(self, window: int) -> int:
        """Return how much it can send at once; a peer also what waits there, and may begin while as many are kept for
        it.
        """
        return 2 * window + RULES.waits if self.source.kind == "peer" else window


class Play:
    """One version fetched from sources with habits."""

    def __init__(self, seed: int) -> None:
        self._chance = chance = Random(seed)
        self._chunks = [chunk_id(number.to_bytes(2)) for number in range(chance.choice(SIZES))]
        self._missing = set(self._chunks)
        peers = [ChunkSource(f"peer-{number}", "peer") for number in range(chance.randint(0, PEERS_MAX))]
        seeders = [SEEDER, replace(SEEDER, name="another seeder")]
        self._players = {source.name: self._player(source) for source in (*peers, *seeders, HTTP)}
        self._honest = self._players[chance.choice([HTTP, SEEDER, *peers[:1]]).name]
        self._honest.habit, self._honest.holds = "honest", self._chunks
        self._now, self._to_come, self._numbers = 0.0, list[tuple[float, int, Callable[[], bool]]](), count()
        self._pace = PlanPace(help_s=chance.choice([0.0, 0.0, 0.5]))
        self._plan = self._drawn_plan()
        self._picker = picker_for(*self._plan.values(), chunks=self._chunks, pace=self._pace)
        self._all_tell()
        for _ in range(chance.randint(0, 3)):
            self._after(8 * chance.random(), self._follow_another_plan)

    def run(self) -> None:
        """Run until every chunk is here."""
        while self._missing:
            assert self._now < ENDS_S, "it does not end"
            assert not self._picker.hopeless(self._now), f"given up with {self._honest.name} at hand"
            for order in self._picker.next(self._now):
                (self._ask if isinstance(order, Ask) else self._take_back)(self._players[order.source], order.chunk)
            self._wait()
        assert not self._picker.missing

    def _player(self, source: ChunkSource) -> Player:
        habit = self._chance.choice(ORIGIN_HABITS if source == HTTP else (*HABITS, "any"))
        tells_all = source.kind != "peer" or habit == "boasts"
        share = 1.0 if tells_all else self._chance.choice([0.0, 0.5, 1.0])
        return Player(source, habit, [chunk for chunk in self._chunks if self._chance.random() < share])

    def _drawn_plan(self) -> dict[str, ChunkSource]:
        """Some of all, at most one seeder, and the honest source; its parts by chance."""
        chance, players = self._chance, self._players.values()
        named = {player.name: player.source for player in players if player is self._honest or chance.random() < 0.6}
        if len(seeders := [name for name, source in named.items() if source.kind == "seeder"]) > 1:
            del named[next(name for name in reversed(seeders) if name != self._honest.name)]
        for name in [name for name in named if name != HTTP.name]:
            named[name] = replace(named[name], stripes=[part for part in range(STRIPES) if chance.random() < 0.5])
        return named

    def _follow_another_plan(self) -> bool:
        """Follow another plan: who owes something stays, with no part of its own."""
        busy = {player.name: replace(player.source, stripes=()) for player in self._players.values() if player.owes}
        self._plan = busy | self._drawn_plan()
        self._picker.follow(self._plan.values(), stripes=STRIPES, pace=self._pace)
        self._all_tell()
        return True

    def _all_tell(self) -> None:
        for name in self._plan:
            self._tell(self._players[name])

    def _tell(self, player: Player) -> None:
        """A peer says soon what it holds, if the plan names it then."""
        if player.source.kind == "peer":
            self._after(
                self._chance.random(),
                lambda: player.name in self._plan and self._picker.had(player.name, player.holds, self._now),
            )

    def _after(self, seconds: float, act: Callable[[], bool]) -> None:
        """Plan what will happen; `act` returns True if that calls for decisions at once."""
        heappush(self._to_come, (self._now + seconds, next(self._numbers), act))

    def _after_unless_settled(self, seconds: float, player: Player, chunk: ChunkId, act: Callable[[], bool]) -> None:
        """Plan what will happen to a WANT, as long as it is open."""
        want = player.owes[chunk]
        self._after(seconds, lambda: player.owes.get(chunk) is want and act())

    def _wait(self) -> None:
        look_at = self._picker.wake_at(self._now)
        while self._to_come and self._to_come[0][0] <= look_at:
            self._now, _, act = heappop(self._to_come)
            if act():
                return
        self._now = look_at

    def _ask(self, player: Player, chunk: ChunkId) -> None:
        assert chunk in self._missing, f"{player.name} is asked for what is here"
        assert chunk not in player.owes, f"{player.name} is asked for what it owes"
        player.owes[chunk] = object()
        wants_max = player.wants_max(self._picker._states[player.name].window)
        assert len(player.owes) <= wants_max, f"{player.name} is asked for more than its window"
        habit, seconds = self._answer_to(player, chunk)
        if habit not in REFUSALS and self._chance.random() < 0.4:
            began_s = seconds * self._chance.random()
            self._after_unless_settled(
                began_s, player, chunk, lambda: self._picker.began(player.name, chunk, self._now)
            )
        self._after_unless_settled(seconds, player, chunk, lambda: self._answer(player, chunk, habit))

    def _answer_to(self, player: Player, chunk: ChunkId) -> tuple[str, float]:
        """Return its answer when asked, and how much later; what an honest peer lacks comes to it late or never."""
        chance, habit = self._chance, player.habit
        if habit == "any":
            habit = chance.choice(HABITS)
        if habit in ("honest", "slow") and chunk not in player.holds:
            return chance.choice(["honest", "absent"]), SLOW_S * chance.choice([0.3, 5.0])
        if habit == "silent":
            return habit, SILENCE_S
        return habit, chance.random() * (SLOW_S if habit == "slow" else USUAL_S)

    def _answer(self, player: Player, chunk: ChunkId, habit: str) -> bool:
        if habit in FAILURES:
            player.owes.clear()
            FAILURES[habit](self._picker, player.name, self._now)
            self._tell(player)
            return True
        del player.owes[chunk]
        if habit in REFUSALS:
            self._picker.refused(player.name, chunk, REFUSALS[habit], self._now)
        else:
            assert self._picker.delivered(player.name, chunk, self._now) is (chunk in self._missing)
            self._missing.discard(chunk)
        return True

    def _take_back(self, player: Player, chunk: ChunkId) -> None:
        """Most confirm that; the origin cannot, who is silent does not, and some answers are on their way already."""
        assert chunk in player.owes, f"taken back from {player.name}, which was not asked"
        if player.source != HTTP and player.habit != "silent" and self._chance.random() < 0.8:
            self._after_unless_settled(0.2 * self._chance.random(), player, chunk, lambda: self._cancel(player, chunk))

    def _cancel(self, player: Player, chunk: ChunkId) -> bool:
        del player.owes[chunk]
        self._picker.refused(player.name, chunk, Reason.CANCELLED, self._now)
        return True


def test_with_an_honest_source_every_chunk_comes_whatever_the_others_do() -> None:
    for seed in range(SEEDS):
        try:
            Play(seed).run()
        except Exception as error:  # whatever it is, its seed is the way to it
            raise AssertionError(f"seed {seed}: {error}") from error
