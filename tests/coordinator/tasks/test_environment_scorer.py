"""An operator's environment in its processes: turns go on, processes are killed, each reward comes to its group."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from coordinator.config.task import EpisodeSection
from coordinator.service.group_scorer import GroupScorer
from coordinator.service.waiting import WaitingRequests
from coordinator.store import tables
from coordinator.store.state import Database
from coordinator.tasks.sandbox import Sandbox
from coordinator.tasks.task_process import TaskProcessSpec
from coordinator.tasks.task_text import TaskText
from coordinator.transactions import scoring
from protocol.tasks import Problem
from protocol.tasks.arithmetic import Arithmetic
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease, Prefix
from protocol.work.rollout import PolicyBounds, RolloutClaim, Sample, pack_logprobs, pack_tokens, unpack_tokens
from tests.coordinator.policy_files import END_TOKEN, VOCABULARY, encode, policy_files
from tests.coordinator.world import ROUND, SAMPLES, World

ENVIRONMENT = '''
import os, pathlib, random, time

class Environment:
    """Adds up what it is told, until the sum passes the limit."""

    def __init__(self, problem, limit=10):
        self.total, self.limit, self.how = 0, limit, problem.answer

    def step(self, turn):
        self.total += int(turn or 0)
        if self.how == "crash" and self.total > 3:
            os._exit(7)
        if self.how == "hang":
            time.sleep(1000)
        if self.how == "number":
            return 7
        if self.how == "random":
            return str(random.SystemRandom().randrange(10**6))
        (pathlib.Path(__file__).parent / f"pid {os.getpid()}").touch()
        return f"{self.total}+" if self.total < self.limit else None

    async def reward(self):
        return {"score": self.total / self.limit, "total": self.total}
'''
LONGEST, DEADLINE_S = 24, 60


class Here:
    """A round as the scorer sees it."""

    def __init__(self, world: World) -> None:
        self.database: Database = world.database
        self.audits, self.terms = world.audits, world.terms
        self.policy = self
        self.waiting = WaitingRequests(world.database)

    async def text(self) -> TaskText:
        return TaskText(policy_files().__getitem__, Arithmetic(), LONGEST)


@pytest.fixture
def play(world: World) -> World:
    world.terms = replace(world.terms, turn_tokens_max=4, max_new_tokens=LONGEST)
    bounds = PolicyBounds(len(VOCABULARY), frozenset({END_TOKEN}), LONGEST)
    world.judge = replace(world.judge, terms=world.terms, reward=None, bounds=bounds)
    return world


def say(key: NodeKey, lease: Lease, *texts: str) -> bytes:
    """The signed turns of a group's samples; those whose episodes are over say nothing."""
    samples = []
    for number, prefix in enumerate(lease.prefixes or (Prefix(tokens=b"", finish=""),) * SAMPLES):
        new = [] if prefix.finish else [*encode(texts[number]), END_TOKEN]
        samples.append(
            Sample(tokens=pack_tokens(new), logprobs=pack_logprobs([-0.5] * len(new)), finish=prefix.finish or "stop")
        )
    claim = RolloutClaim(round_id=ROUND, lease_id=lease.lease_id, lease_digest=lease.digest, samples=tuple(samples))
    return key.seal("rollout", claim.to_bytes())


def scored(
    world: World,
    folder: Path,
    until: Callable[[], bool],
    *,
    how: str = "",
    limits: EpisodeSection | None = None,
    timeout_s: float = 30.0,
) -> None:
    """Let the scorer work until something holds."""
    (folder / "mine.py").write_text(ENVIRONMENT)
    place = (f"{folder}/mine.py:Environment", {"limit": 9})
    writes = Sandbox(writable=(str(folder),))
    spec = TaskProcessSpec((), timeout_s=timeout_s, processes=1, environment=place, sandbox=writes)

    async def work() -> None:
        def about(_source: object) -> Problem:
            return Problem("1+1=", how)

        scorer = GroupScorer(Here(world), spec, about, lambda: world.now_ms, episodes=limits, pause_s=0.2)
        running = asyncio.create_task(scorer.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not until():
                    done, _ = await asyncio.wait([running], timeout=0.05)
                    assert not done
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(work())


def states(world: World) -> list[str]:
    return [row["state"] for row in world.rows(tables.rollouts)]


def next_lease(world: World, key: NodeKey) -> Lease:
    (lease,) = world.offer(key, continues=True).leases
    return lease


def text_of(prefix: Prefix) -> str:
    characters = {token: character for character, token in VOCABULARY.items()}
    return "".join(characters[int(token)] for token in unpack_tokens(prefix.tokens) if token != END_TOKEN)


def test_an_environment_of_the_operators_goes_on_turn_by_turn_to_its_rewards(play: World, tmp_path: Path) -> None:
    key = play.join(1)
    play.submit(key, say(key, play.lease(key), "2", "9"))
    scored(play, tmp_path, lambda: states(play) == ["turn"])
    second = next_lease(play, key)
    assert [prefix.finish for prefix in second.prefixes] == ["", "stop"]
    assert text_of(second.prefixes[0]) == "22+"
    play.submit(key, say(key, second, "7", ""))
    scored(play, tmp_path, lambda: "unscored" not in states(play))
    row = play.rows(tables.rollouts)[1]
    assert row["state"] == "buffered"
    assert row["marks"]["components"] == {"total": [9.0, 9.0]}
    assert len(list(tmp_path.glob("pid *"))) == 2, "the second process played the first turn again"


def test_a_killed_process_changes_nothing(play: World, tmp_path: Path) -> None:
    """The prefixes are those without the kill: the episode is played again from its turns."""
    key = play.join(1)
    play.submit(key, say(key, play.lease(key), "2", "3"))
    scored(play, tmp_path, lambda: states(play) == ["turn"])
    play.submit(key, say(key, next_lease(play, key), "1", "1"))

    def killed() -> bool:
        for path in tmp_path.glob("pid *"):
            with suppress(ProcessLookupError):
                os.kill(int(path.name.split()[1]), signal.SIGKILL)
        return states(play) == ["turn", "turn"]

    scored(play, tmp_path, killed)
    assert [text_of(prefix) for prefix in next_lease(play, key).prefixes] == ["22+13+", "33+14+"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("crash", "ended with code 7"),
        ("hang", "did not answer within 1 s (reward.timeout_s)"),
        ("number", "step returned int. It must return text"),
    ],
)
def test_an_environment_that_misbehaves_costs_the_group(play: World, tmp_path: Path, how: str, said: str) -> None:
    key = play.join(1)
    play.submit(key, say(key, play.lease(key), "5", "1"))
    scored(play, tmp_path, lambda: states(play) == ["verifier_error"], how=how, timeout_s=1.0)
    assert said in play.run(scoring.trouble)["reason"]


def test_an_environment_that_answers_otherwise_when_played_again_costs_the_group(play: World, tmp_path: Path) -> None:
    key = play.join(1)
    play.submit(key, say(key, play.lease(key), "2", "3"))
    scored(play, tmp_path, lambda: states(play) == ["turn"], how="random")
    play.submit(key, say(key, next_lease(play, key), "1", "1"))
    scored(play, tmp_path, lambda: states(play) == ["unused", "verifier_error"], how="random")
    assert "something else when its episode was played again" in play.run(scoring.trouble)["reason"]


def test_the_last_turn_that_is_allowed_ends_an_episode(play: World, tmp_path: Path) -> None:
    key = play.join(1)
    play.submit(key, say(key, play.lease(key), "2", "3"))
    scored(play, tmp_path, lambda: states(play) == ["buffered"], limits=EpisodeSection(turns_max=1))
    row = play.rows(tables.rollouts)[0]
    assert sum(sum(values) for values in row["marks"]["components"].values()) == 5.0


def test_an_answer_without_room_for_a_turn_ends_an_episode(play: World, tmp_path: Path) -> None:
    """20 of 24 tokens are taken after five turns; the next answer has two, and a turn has at most four."""

    def answered(turns: int) -> bool:
        return len(states(play)) == turns and "unscored" not in states(play)

    key = play.join(1)
    lease = play.lease(key)
    for turn in range(1, 9):
        play.submit(key, say(key, lease, "1", "0"))
        scored(play, tmp_path, partial(answered, turn))
        if states(play)[-1] == "buffered":
            break
        lease = next_lease(play, key)
    assert states(play)[-1] == "buffered"
    lengths = [len(prefix.tokens) // 4 for prefix in lease.prefixes]
    assert all(20 <= length < LONGEST for length in lengths)
