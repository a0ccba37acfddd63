"""kill -9 a node within a turn of an episode, and between two turns: another node goes on with the same tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import sqlalchemy as sa

from coordinator.transactions.turns import AcceptedTurn, WholeSample, chain, whole_samples
from protocol.policy.codec import PolicyCodec
from protocol.policy.manifest import Sampler
from protocol.work.lease import OPEN, Lease, Prefix
from protocol.work.rollout import pack_tokens, unpack_tokens
from swarm_node.engine.choose import ENGINES, EngineOptions
from swarm_node.engine.messages import SampleRequest
from tests.processes.light_node import END
from tests.processes.programs import Program, Swarm, until
from tests.processes.rounds import (
    NOBODY_LEARNS,
    Coordinator,
    Settings,
    assert_ledger_is_sound,
    join,
    node_id_of,
    operator_of,
    outbox_of,
)
from tests.vllm.child import Child

pytestmark = pytest.mark.processes

SAMPLES, TURNS, TURN_TOKENS = 32, 3, 100
LEASE_TIMEOUT_S = 6.0
SAMPLER = Sampler(temperature=1.0, max_new_tokens=400)
NATS = 1e-5
"""The difference between keys and values that were computed token by token, and the same from a prefix."""

ENVIRONMENT = """
import time
from pathlib import Path

HOLD = Path({hold!r})


def problems(split, seed):
    first = {{"train": 0, "validation": 200, "held_out": 400}}[split]
    for number in range(first, first + 100):
        yield {{"prompt": f"{{number}}+"}}


class Environment:
    turns = 0

    def __init__(self, problem):
        self.problem = problem

    def step(self, turn):
        self.turns += 1
        while self.turns == 1 and HOLD.exists():
            time.sleep(0.02)
        return f"={{len(turn)}}+" if self.turns < 3 else None

    def reward(self):
        return 0.5
"""


class LeaseRow(NamedTuple):
    """A lease as the store has it."""

    lease_id: str
    group_no: int
    node_id: str
    state: str
    continues: str | None
    issued_ms: int
    offer: Lease


@pytest.fixture(scope="module")
def hold(swarm: Swarm) -> Path:
    """The file that keeps the environment from answering first turns, while it exists."""
    return swarm.folder / "hold"


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm, large_policy: Path, hold: Path) -> Coordinator:
    file = swarm.folder / "counting.py"
    file.write_text(ENVIRONMENT.format(hold=str(hold)))
    settings: Settings = {
        "task": {"name": str(file)},
        "episode": {"turns_max": TURNS, "turn_tokens_max": TURN_TOKENS},
        "sampling": {"samples_per_group": SAMPLES, "max_new_tokens": SAMPLER.max_new_tokens},
        "reward": {"timeout_s": 600.0, "processes": 1},
        "leases": {"timeout_s": LEASE_TIMEOUT_S},
        **NOBODY_LEARNS,
    }
    made = Coordinator(swarm, settings).start()
    operator_of(swarm, made, large_policy).publish()
    return made


@contextmanager
def at_work(swarm: Swarm, coordinator: Coordinator, name: str) -> Iterator[Program]:
    """A real node that samples one group at a time."""
    node = join(swarm, name, coordinator.join_string, "--groups", "1", "--engine", "torch")
    yield node
    if node.running:
        node.interrupt()


def leases_of(coordinator: Coordinator, where: str, **values: Any) -> list[LeaseRow]:
    """Leases by a condition, the first one first."""
    columns = "lease_id, group_no, node_id, state, continues, issued_ms, offer"
    with coordinator.copy_of_store() as connection:
        stmt = sa.text(f"SELECT {columns} FROM leases WHERE {where} ORDER BY issued_ms")
        rows = connection.execute(stmt, values).mappings()
        return [LeaseRow(**{**row, "offer": Lease.from_bytes(row["offer"])}) for row in rows]


def frozen_within_a_turn(node: Program, node_id: str, home: Path, coordinator: Coordinator) -> LeaseRow | None:
    """Stop a node and its engine, if that is while it samples a second or third turn; else let them go on."""
    family = [*node.descendants(), psutil.Process(node.process.pid)]
    for member in family:
        member.suspend()
    begun = "".join(path.read_text() for path in home.glob("rounds/*/leased"))
    unsent = outbox_of(home)
    for lease in leases_of(coordinator, "node_id = :node", node=node_id):
        is_sampled = lease.state in OPEN and lease.lease_id in begun and lease.lease_id not in unsent
        if is_sampled and lease.offer.prefixes:
            return lease
    for member in reversed(family):
        member.resume()
    return None


def played(coordinator: Coordinator, group_no: int) -> list[AcceptedTurn]:
    """The turns of a group, once its episodes are over."""

    def look() -> list[AcceptedTurn]:
        with coordinator.copy_of_store() as connection:
            last = sa.text("SELECT lease_id FROM rollouts WHERE group_no = :group AND state = 'buffered'")
            return chain(connection, connection.execute(last, {"group": group_no}).scalar())

    return until(f"the episodes of group {group_no} to end", look)


def undisturbed(policy: Path, first: Lease) -> list[WholeSample]:
    """The episodes that begin with this lease, played by one engine to their ends."""
    codec = PolicyCodec((policy / "tokenizer.json").read_text())
    request = SampleRequest.from_lease(first, SAMPLER, report_every_s=0.0)
    made = [WholeSample(b"", b"", b"")] * first.samples
    with Child(ENGINES["torch"].command(EngineOptions(threads=1))) as child:
        child.load(policy, first.version)
        for turn in range(TURNS):
            (drawn,) = child.sample(request).values()
            for number, one in enumerate(drawn):
                words = unpack_tokens(one.tokens).tolist()
                text = codec.decode(words[:-1] if words[-1] == END else words)
                then = pack_tokens(codec.encode(f"={len(text)}+")) if turn < TURNS - 1 else b""
                tokens, logprobs, sampled = made[number]
                sampled += bytes([1] * len(words) + [0] * (len(then) // 4))
                logprobs += one.logprobs + bytes(len(then))
                made[number] = WholeSample(tokens + one.tokens + then, logprobs, sampled)
            prefixes = tuple(Prefix(tokens=tokens, finish="") for tokens, _, _ in made)
            request = request.model_copy(update={"prefixes": prefixes})
    return made


def assert_undisturbed(turns: list[AcceptedTurn], policy: Path) -> None:
    """Token for token, the same as in one run; log-probabilities as far as float32 goes."""
    for one, right in zip(whole_samples(turns), undisturbed(policy, turns[0].lease), strict=True):
        assert one[0] == right[0]
        assert one[2] == right[2]
        logprobs, wanted_logprobs = (np.frombuffer(each[1], "<f4") for each in (one, right))
        np.testing.assert_allclose(logprobs, wanted_logprobs, atol=NATS)


@pytest.mark.slow
def test_a_turn_of_a_node_killed_within_it_goes_to_another_when_its_lease_has_ended(
    swarm: Swarm, coordinator: Coordinator, large_policy: Path
) -> None:
    with at_work(swarm, coordinator, "victim") as victim:
        victim_id = node_id_of(victim)
        home = swarm.folder / victim.name
        killed = until(
            "the node to sample a later turn", lambda: frozen_within_a_turn(victim, victim_id, home, coordinator)
        )
        assert killed
        engine = victim.descendants()
        victim.kill()
        for process in engine:
            process.resume()  # it finds its node gone
    with at_work(swarm, coordinator, "heir") as heir:
        heir_id = node_id_of(heir)
        turns = played(coordinator, killed.group_no)
    issued = leases_of(coordinator, "group_no = :group", group=killed.group_no)
    lost, second = (lease for lease in issued if lease.continues == killed.continues)
    assert (lost.lease_id, lost.state) == (killed.lease_id, "expired")
    assert (second.node_id, second.state) == (heir_id, "accepted")
    assert second.issued_ms >= lost.offer.expires_ms
    assert second.offer.prefixes == lost.offer.prefixes
    played_before = 1 + [turn.lease.lease_id for turn in turns].index(killed.continues or "")
    by_whom = [turn.node_id for turn in turns]
    assert by_whom == [victim_id] * played_before + [heir_id] * (TURNS - played_before)
    assert_undisturbed(turns, large_policy)
    assert_ledger_is_sound(coordinator)


def test_the_next_turn_of_a_node_killed_between_turns_goes_to_another_at_once(
    swarm: Swarm, coordinator: Coordinator, large_policy: Path, hold: Path
) -> None:
    hold.touch()

    def unanswered() -> LeaseRow | None:
        condition = "lease_id IN (SELECT lease_id FROM rollouts WHERE state = 'unscored') AND node_id = :node"
        rows = leases_of(coordinator, condition, node=node_id)
        return next((row for row in rows if not row.offer.prefixes), None)

    with at_work(swarm, coordinator, "second-victim") as victim:
        node_id = node_id_of(victim)
        answered = until("a first turn without an answer", unanswered)
        assert answered
        victim.kill()
    hold.unlink()
    with at_work(swarm, coordinator, "second-heir") as heir:
        heir_id = node_id_of(heir)
        turns = played(coordinator, answered.group_no)
    issued = leases_of(coordinator, "group_no = :group AND state <> 'skipped'", group=answered.group_no)
    assert [(lease.node_id, lease.state) for lease in issued] == [
        (node_id, "accepted"), (heir_id, "accepted"), (heir_id, "accepted")
    ]  # fmt: skip  # no lease had to expire
    assert [turn.node_id for turn in turns] == [lease.node_id for lease in issued]
    assert_undisturbed(turns, large_policy)
    assert_ledger_is_sound(coordinator)
