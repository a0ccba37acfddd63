"""A caller reads an answer while a real node samples it; kill -9 that node, and another one goes on with the text."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import sqlalchemy as sa

from protocol.work.lease import OPEN, LeaseState
from tests.processes.programs import PATIENCE_S, Program, Swarm, said, until
from tests.processes.rounds import Coordinator, Settings, assert_ledger_is_sound, join, node_id_of

pytestmark = pytest.mark.processes

TOKENS, SAMPLES = 480, 8

SETTINGS: Settings = {
    "sampling": {"max_new_tokens": TOKENS},
    "learner": {"external": True},
    "leases": {"timeout_s": 30.0, "heartbeat_s": 1.0},
}

ASKED = {"model": "swarm", "prompt": "12+34=", "temperature": 0, "n": SAMPLES, "return_token_ids": True}
"""A long request: at temperature 0 the untrained policy never ends. All samples are the same, but more take longer."""


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm, large_policy: Path) -> Coordinator:
    made = Coordinator(swarm, {**SETTINGS, "model": {"path": str(large_policy)}}).start(learner=True, auditor=False)
    made.reaches("version", 1)
    return made


@pytest.fixture(scope="module")
def key(swarm: Swarm, coordinator: Coordinator) -> str:
    words = (str(coordinator.config_file), "reader", "--budget", "1000000")
    return said(swarm, "swarm-coordinator", "api-keys", "create", *words).split()[1]


@contextmanager
def stream(coordinator: Coordinator, key: str, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the choices of a stream as they come; an error among them fails the test."""
    headers, body = {"Authorization": f"Bearer {key}"}, ASKED | {"stream": True} | fields
    with coordinator.http.stream("POST", "/v1/completions", json=body, headers=headers, timeout=300) as response:
        assert response.status_code == 200, response.read()

        def choices() -> Iterator[dict[str, Any]]:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    yield from chunk["choices"]

        yield choices()


def whole(coordinator: Coordinator, key: str, **fields: Any) -> list[int]:
    """The token ids of the answer that is not read while it grows."""
    headers, body = {"Authorization": f"Bearer {key}"}, ASKED | fields
    response = httpx.post(f"{coordinator.url}/v1/completions", json=body, headers=headers, timeout=300)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


class Sampler(NamedTuple):
    """A node that samples, and its lease."""

    name: str
    lease_id: str


def at_work(coordinator: Coordinator, nodes: dict[str, Program]) -> Sampler | None:
    """The node that samples; none where the answer is whole already.

    It has the newest lease: a node that does not report an offered one loses the query to the next.
    """
    names = {node_id_of(node): name for name, node in nodes.items()}
    with coordinator.copy_of_store() as connection:
        newest_first = sa.text("SELECT lease_id, node_id, state FROM leases ORDER BY issued_ms DESC")
        for lease_id, node_id, state in connection.execute(newest_first):
            if state in OPEN and node_id in names:
                return Sampler(names[node_id], lease_id)
    return None


class Reading(NamedTuple):
    """One stream of the answer: what came, and which node was killed meanwhile."""

    tokens: list[int]
    parts: int
    killed: Sampler | None
    last: dict[str, Any]


def kill_at_work(coordinator: Coordinator, nodes: dict[str, Program]) -> Sampler | None:
    """Kill the node that samples, and return it. Both are stopped before, so that neither sends the answer."""
    for node in nodes.values():
        node.process.send_signal(signal.SIGSTOP)
    if killed := at_work(coordinator, nodes):
        nodes[killed.name].kill()
    for name, node in nodes.items():
        if not killed or name != killed.name:
            node.process.send_signal(signal.SIGCONT)
    return killed


def had_answered(coordinator: Coordinator, nodes: dict[str, Program], killed: Sampler) -> bool:
    """Return True if the answer was on its way already when the node was stopped."""
    return coordinator.leases_of(node_id_of(nodes[killed.name]))[killed.lease_id] == LeaseState.ACCEPTED


def read_and_kill(coordinator: Coordinator, key: str, nodes: dict[str, Program]) -> Reading:
    """Read a stream; at its first part kill the node that samples. The answer may be whole by then: nobody dies."""
    tokens, parts, killed, last = list[int](), 0, None, dict[str, Any]()
    with stream(coordinator, key) as choices:
        for choice in choices:
            if choice["index"]:
                continue
            tokens += choice["token_ids"]
            parts += bool(choice["token_ids"])
            if parts == 1 and not killed:
                killed = kill_at_work(coordinator, nodes)
            last = choice
    return Reading(tokens, parts, killed, last)


def test_an_answer_is_read_while_it_grows_and_survives_its_node(
    swarm: Swarm, coordinator: Coordinator, key: str
) -> None:
    nodes = {name: join(swarm, name, coordinator.join_string, "--engine", "torch") for name in ("first", "second")}
    expected = whole(coordinator, key)
    assert len(expected) == TOKENS, "the policy ended it"

    def both_are_known() -> bool:
        whole(coordinator, key, n=1, max_tokens=8)
        rows = coordinator.leaderboard()
        earned = [rows[node_id_of(node)] for node in nodes.values()]
        return all(row["pending_micros"] + row["posted_micros"] > 0 for row in earned)

    until("both nodes to have answered a query", both_are_known, within_s=4 * PATIENCE_S)

    def one_died_in_the_middle() -> Reading | None:
        read = read_and_kill(coordinator, key, nodes)
        if read.killed and had_answered(coordinator, nodes, read.killed):
            nodes[read.killed.name] = join(swarm, read.killed.name, coordinator.join_string, "--engine", "torch")
            return None
        return read if read.killed else None

    read = until("an answer whose node dies in the middle", one_died_in_the_middle, within_s=4 * PATIENCE_S)
    assert read
    assert read.parts >= 2, "it did not come in one piece"
    assert read.tokens == expected
    assert (read.last["finish_reason"], len(read.last["receipt"])) == ("length", 64)
    with coordinator.copy_of_store() as connection:
        query = sa.text(
            "SELECT lease_id, node_id, state, issued_ms, continues FROM leases ORDER BY issued_ms DESC LIMIT 3"
        )
        rows = connection.execute(query).all()
    assert rows[0].continues, f"the second node began anew after {read.killed}: {rows}"
    assert_ledger_is_sound(coordinator)
