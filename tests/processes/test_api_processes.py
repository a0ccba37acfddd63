"""A round on PostgreSQL, served by two processes at once: nothing is given out, used or paid twice."""

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import pytest
import sqlalchemy as sa

from coordinator.store import state
from ledger import store
from ledger.accounts import OUTSIDE, pending
from ledger.proof import check_receipt
from protocol.errors import NonceReplayed, NotFound
from protocol.policy import chunks
from protocol.wire.signing import open_envelope
from protocol.work.messages import FetchPlan, Heartbeat, HeartbeatReply, PlanRequest, Transfer, Verdict
from tests.ledger import postgres
from tests.processes.light_node import LightNode, at_work
from tests.processes.programs import PATIENCE_S, Program, Swarm, free_address, said, script, until
from tests.processes.rounds import Coordinator, Settings, operator_of

pytestmark = pytest.mark.processes

GROUPS = 60
LABOURERS_EACH = 2
RACES = 20
"""Each is another chance to meet in the middle."""

T = TypeVar("T")
SETTINGS: Settings = {
    "sampling": {"samples_per_group": 2},
    "staleness": {"max_updates": 100, "publish_every": 1},
    "learner": {"groups_per_update": 4},
    "leases": {"groups_per_request": 2},
}
BEAT = Heartbeat(
    session="0" * 16,
    version=1,
    phase="idle",
    tokens_per_s=1.0,
    transfer=Transfer(from_peers=0, from_seeder=0, from_http=0, to_peers=0),
    blames=(),
    reached=(),
)


class Doors:
    """A launched round, and a second process beside it."""

    def __init__(self, swarm: Swarm, policy: Path, postgres_url: str) -> None:
        self.postgres_url = postgres_url
        self.swarm = swarm
        self.first = Coordinator(swarm, {**SETTINGS, "store": {"url": postgres_url}}).start()
        self.operator = operator_of(swarm, self.first, policy)
        self.operator.publish()
        self._address = free_address()
        self.second = self.open()
        _, _, self.round_id = self.first.join_string.partition("#")
        self.join_strings = (self.first.join_string, f"http://{self._address}#{self.round_id}")

    def open(self) -> Program:
        """Start the process beside, as its supervisor does."""
        command = [script("swarm-coordinator"), "api", str(self.first.folder), "--listen", self._address]
        self.second = self.swarm.start("api", *command)
        self.second.said("Serving nodes")
        return self.second

    def second_leaves(self) -> None:
        """Make a process end with an error that says why, so that its supervisor starts it again."""
        assert self.second.process.wait(timeout=PATIENCE_S) == 2, self.second.log
        assert "other settings or keys" in self.second.log


@pytest.fixture(scope="module")
def doors(swarm: Swarm, policy: Path) -> Iterator[Doors]:
    if reason := postgres.missing():
        pytest.skip(reason)  # several processes share a store on PostgreSQL alone
    with postgres.cluster(durable=False) as url:
        yield Doors(swarm, policy, url)


def test_two_processes_lease_no_group_twice_and_credit_no_rollout_twice(doors: Doors) -> None:
    with at_work(*doors.join_strings * LABOURERS_EACH) as crowd:
        until(f"{GROUPS} verdicts", lambda: sum(len(node.acknowledged) for node in crowd) >= GROUPS)
        batch = doors.operator.client.batch(1)
    heard = {lease: (sent, verdict) for node in crowd for lease, (sent, verdict) in node.acknowledged.items()}
    assert {verdict.outcome for _, verdict in heard.values()} == {"accepted"}
    assert all(node.acknowledged for node in crowd), "one of the doors gave nobody work"
    assert len(batch.groups) == SETTINGS["learner"]["groups_per_update"]

    engine = state.engine(doors.postgres_url)
    with engine.connect() as connection:
        leased = Counter(connection.execute(sa.text("SELECT group_no FROM leases")).scalars())
        rollouts = connection.execute(sa.text("SELECT claim_id, credit_micros FROM rollouts")).all()
        claims = connection.execute(sa.text("SELECT claim_id, amount_micros FROM ledger_claims")).all()
        assert store.rebuild(connection) == []
        balances = store.balances(connection)
    engine.dispose()
    assert set(leased.values()) == {1}
    said = {chunks.digest(open_envelope("rollout", sent).payload): v.credit_micros for sent, v in heard.values()}
    assert sorted(map(tuple, rollouts)) == sorted(map(tuple, claims)) == sorted(said.items())
    assert balances[OUTSIDE] == -sum(micros for account, micros in balances.items() if account != OUTSIDE)


def test_a_request_that_one_process_has_seen_is_refused_by_the_other(doors: Doors) -> None:
    first, second = (LightNode(join_string, seed=b"7" * 32) for join_string in doors.join_strings)
    first.register()
    sealed = first.sealed("/v1/heartbeat", BEAT)
    assert first.http.post("/v1/heartbeat", content=sealed).status_code == 200
    replayed = second.http.post("/v1/heartbeat", content=sealed)
    assert replayed.status_code == NonceReplayed.http_status
    first.close()
    second.close()


def test_what_is_sent_to_both_at_once_happens_once(doors: Doors) -> None:
    """An attacker who knows both doors: the same bytes, the same rollout in two requests, and two for one lease."""
    sides = [LightNode(join_string, seed=b"8" * 32) for join_string in doors.join_strings]
    first = sides[0]
    first.register()
    newest = first.beat().newest_version
    for _ in range(RACES):
        sealed = first.sealed("/v1/heartbeat", BEAT)
        beats = at_once(beat, sides, [sealed, sealed])
        assert sorted(beats) == sorted([200, NonceReplayed.http_status])
        (lease,) = until("a lease", lambda: first.lease(newest))
        answer = first.answer(lease)
        verdicts = at_once(submit, sides, [answer, answer])
        assert sorted(verdict.outcome for verdict in verdicts) == ["accepted", "already_accepted"]
        assert len({verdict.credit_micros for verdict in verdicts}) == 1
        (lease,) = until("a lease", lambda: first.lease(newest))
        verdicts = at_once(submit, sides, [first.answer(lease), first.answer(lease)])
        assert sorted((verdict.outcome, verdict.code) for verdict in verdicts) == [
            ("accepted", ""), ("rejected", "lease_conflict"),
        ]  # fmt: skip
    engine = state.engine(doors.postgres_url)
    with engine.connect() as connection:
        mine = sa.text("SELECT count(*), sum(credit_micros) FROM rollouts WHERE node_id = :node")
        count, earned = connection.execute(mine, {"node": first.key.node_id}).one()
        assert store.balances(connection)[pending(first.key.node_id)] == earned
        assert store.rebuild(connection) == []
    engine.dispose()
    assert count == 2 * RACES
    for side in sides:
        side.close()


def beat(side: LightNode, sealed: bytes) -> int:
    return side.http.post("/v1/heartbeat", content=sealed).status_code


def submit(side: LightNode, rollout: bytes) -> Verdict:
    return side.submit(rollout)[0]


def at_once(send: Callable[[LightNode, bytes], T], sides: list[LightNode], said: list[bytes]) -> list[T]:
    """Send through both processes at the same moment; return the answers."""
    start = Barrier(len(sides))

    def call(side: LightNode, data: bytes) -> T:
        start.wait(timeout=30)
        return send(side, data)

    with ThreadPoolExecutor(len(sides)) as threads:
        return list(threads.map(call, sides, said))


def test_the_process_beside_hears_of_a_version_and_leaves_plans_to_the_first(doors: Doors) -> None:
    node = LightNode(doors.join_strings[1])
    node.register()
    version = doors.operator.publish(update=1)
    until("the news", lambda: node.call("/v1/heartbeat", BEAT, HeartbeatReply).newest_version == version)
    with pytest.raises(NotFound, match="the process that leads"):
        node.call("/v1/plan", PlanRequest(version=version), FetchPlan)
    assert node.http.get("/v1/learner/state").status_code == NotFound.http_status
    until("the status to know it", lambda: node.http.get("/v1/status").json()["version"] == version)
    node.close()


def test_the_operator_finds_payouts_and_evaluations_in_postgresql(doors: Doors) -> None:
    for words in (["payout", "list"], ["eval", "list"]):
        command = [script("swarm-coordinator"), *words, str(doors.first.config_file), "--json"]
        assert json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) == []


def test_the_process_beside_leaves_when_the_first_goes_on_with_other_settings(doors: Doors) -> None:
    doors.first.program.interrupt()
    assert doors.second.running
    doors.first.start()
    doors.first.program.interrupt()
    config = doors.first.config_file.read_text()
    doors.first.config_file.write_text(config.replace("max_updates = 100", "max_updates = 90"))
    doors.first.start()
    doors.second_leaves()
    doors.open()


def test_the_process_beside_gives_no_receipts_by_keys_that_were_replaced(doors: Doors) -> None:
    doors.first.program.interrupt()
    assert said(doors.swarm, "swarm-coordinator", "keys", "rotate", "ledger", str(doors.first.config_file))
    assert doors.second.running
    doors.first.start()
    doors.second_leaves()
    doors.open()
    node = LightNode(doors.join_strings[1], seed=b"9" * 32)
    node.register()
    (lease,) = until("a lease", lambda: node.lease(node.beat().newest_version))
    sent = node.answer(lease)
    assert node.submit(sent)[0].outcome == "accepted"
    claim = chunks.digest(open_envelope("rollout", sent).payload)
    receipt = f"/v1/receipts/{claim}"
    until("a receipt", lambda: node.http.get(receipt).status_code == 200)
    made = node.http.get(receipt).content
    assert check_receipt(made, doors.round_id)
    node.close()
