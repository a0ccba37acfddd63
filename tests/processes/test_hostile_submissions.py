"""Hostile requests to a coordinator: each gets its named answer, and costs neither memory nor uptime."""

import gzip
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from protocol import limits
from protocol.errors import ERRORS, SwarmError
from protocol.policy import chunks
from protocol.wire import canonical
from protocol.wire.message import Message
from protocol.work.learning import UpdateReport
from protocol.work.lease import Lease
from protocol.work.messages import HeartbeatReply, LeaseRequest, ReturnLeases, Submission, seal_request
from protocol.work.rollout import Sample, pack_logprobs
from tests.processes.light_node import LightNode
from tests.processes.programs import Swarm
from tests.processes.rounds import Coordinator, Operator, Settings, assert_ledger_is_sound, operator_of

pytestmark = pytest.mark.processes

GROUPS_PER_UPDATE = 4
SETTINGS: Settings = {
    "sampling": {"samples_per_group": 2},
    "staleness": {"max_updates": 1, "publish_every": 1},
    "learner": {"groups_per_update": GROUPS_PER_UPDATE},
    "leases": {"timeout_s": 600.0},
}

HUGE = 100 * limits.MIB
FLOOD_GROWTH_MAX = 32 * limits.MIB
"""The most that refused requests may hold for a moment: up to the limit; a hundred megabytes may not."""

COPIES_MAX = 16
"""Copies of the largest message, at most, as it is read, decoded, checked and decoded again inside; nothing adds up."""


@dataclass
class Scene:
    """A coordinator with one version, and its operator."""

    coordinator: Coordinator
    operator: Operator

    def newcomer(self) -> LightNode:
        node = LightNode(self.coordinator.join_string)
        node.register()
        return node

    def update_once(self) -> None:
        """Let the learner move on by one update, on rollouts of the newest version, and publish."""
        number = int(self.coordinator.status()["batch"]) + 1
        with closing(self.newcomer()) as node:
            leases = node.lease(self.coordinator.status()["version"], GROUPS_PER_UPDATE)
            node.submit(*map(node.answer, leases))
        client = self.operator.client
        assert client.batch(number).number == number
        client.report(UpdateReport(number=number, mismatched=(), metrics={}, idle_s=0.0, busy_s=0.0))
        self.operator.publish(number)


@pytest.fixture(scope="module")
def scene(swarm: Swarm, policy: Path) -> Scene:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, policy)
    operator.publish()
    return Scene(coordinator, operator)


@pytest.fixture
def node(scene: Scene) -> Iterator[LightNode]:
    """A registered node; afterwards the coordinator must be up and its books sound."""
    with closing(scene.newcomer()) as made:
        yield made
        assert made.beat().newest_version
    assert_ledger_is_sound(scene.coordinator)


@pytest.fixture
def lease(scene: Scene, node: LightNode) -> Iterator[Lease]:
    (given,) = node.lease(scene.coordinator.status()["version"])
    yield given
    node.give_back([given])


def sealed(node: LightNode, lease: Lease, **changed: object) -> bytes:
    """A signed answer in which something is not as it should be."""
    return node.key.seal("rollout", node.claim(lease).model_copy(update=changed).to_bytes())


def code_of(node: LightNode, rollout: bytes) -> str:
    """The outcome of one submitted rollout, by name."""
    (verdict,) = node.submit(rollout)
    return verdict.code or verdict.outcome


def refusal_of(node: LightNode, path: str, message: Message) -> str:
    with pytest.raises(SwarmError) as refused:
        node.call(path, message, HeartbeatReply)
    return refused.value.code


def test_replayed_rollout_is_not_credited_twice(scene: Scene, node: LightNode, lease: Lease) -> None:
    rollout = node.answer(lease)
    (first,) = node.submit(rollout)
    assert (first.outcome, first.credit_micros > 0) == ("accepted", True)
    earned = scene.coordinator.leaderboard()[node.key.node_id]["pending_micros"]
    assert earned == first.credit_micros
    again, twice = node.submit(rollout, rollout)
    assert again == twice == first.model_copy(update={"outcome": "already_accepted"})
    row = scene.coordinator.leaderboard()[node.key.node_id]
    assert (row["pending_micros"], row["accepted_rollouts"]) == (earned, 1)


def test_second_answer_to_a_lease_is_a_conflict(node: LightNode, lease: Lease) -> None:
    assert code_of(node, node.answer(lease)) == "accepted"
    assert code_of(node, node.answer(lease)) == "lease_conflict"


def test_rollout_under_anothers_lease_is_refused_and_leaves_the_lease_alone(
    scene: Scene, node: LightNode, lease: Lease
) -> None:
    with closing(scene.newcomer()) as thief:
        assert code_of(thief, thief.answer(lease)) == "lease_of_another"
        assert code_of(thief, node.answer(lease)) == "lease_of_another"  # stolen on the way, sent in one's own name
        assert scene.coordinator.leaderboard()[thief.key.node_id]["pending_micros"] == 0
        thief.give_back([lease])
    assert code_of(node, node.answer(lease)) == "accepted"


def test_rollout_for_a_lease_that_was_never_given_is_refused(node: LightNode, lease: Lease) -> None:
    assert code_of(node, sealed(node, lease, lease_id="0" * 32)) == "unknown_lease"


def test_rollout_for_a_version_too_old_is_refused(scene: Scene, node: LightNode) -> None:
    (slow,) = node.lease(scene.coordinator.status()["version"])
    scene.update_once()
    scene.update_once()
    assert code_of(node, node.answer(slow)) == "stale_version"
    assert node.lease(slow.version) == ()
    assert scene.coordinator.leaderboard()[node.key.node_id]["pending_micros"] == 0


def test_claim_for_a_lease_of_other_words_is_refused(node: LightNode, lease: Lease) -> None:
    assert code_of(node, sealed(node, lease.model_copy(update={"seed": lease.seed ^ 1}))) == "lease_mismatch"


def with_logprobs(sample: Sample, value: float) -> Sample:
    return sample.model_copy(update={"logprobs": pack_logprobs([value] * (len(sample.logprobs) // 4))})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.5])
def test_impossible_log_probabilities_are_refused(node: LightNode, lease: Lease, value: float) -> None:
    samples = tuple(with_logprobs(sample, value) for sample in node.claim(lease).samples)
    assert code_of(node, sealed(node, lease, samples=samples)) == "logprobs_invalid"


def test_rollout_signed_by_nobody_is_refused(node: LightNode, lease: Lease) -> None:
    rollout = bytearray(node.answer(lease))
    rollout[-80] ^= 1
    assert code_of(node, bytes(rollout)) in ("bad_signature", "malformed_message", "not_canonical")


def test_garbage_in_a_signed_request_is_refused_by_name(node: LightNode) -> None:
    assert code_of(node, b"\x00" * 1000) == "malformed_message"
    assert code_of(node, b"") == "malformed_message"
    assert code_of(node, node.key.seal("rollout", b"\xc1" * 100)) == "not_canonical"
    nested = b"\x91" * 1_000_000 + b"\x00"
    assert code_of(node, nested) == "message_too_large"
    assert code_of(node, node.key.seal("rollout", nested)) == "message_too_large"


def test_request_for_another_path_round_or_time_is_refused(scene: Scene, node: LightNode) -> None:
    give_back = ReturnLeases(lease_ids=())
    assert answer_to(scene, node.sealed("/v1/heartbeat", give_back)) == (401, "wrong_audience")

    def signed(round_id: str, late_ms: int) -> bytes:
        now_ms = time.time_ns() // 1_000_000 - late_ms
        path, nonce = "/v1/leases/return", bytes(limits.NONCE_BYTES)
        return seal_request(node.key, round_id=round_id, path=path, nonce=nonce, now_ms=now_ms, body=give_back)

    assert answer_to(scene, signed("0" * 64, 0)) == (401, "wrong_audience")
    for late_s in (limits.CLOCK_SKEW_MAX_S + 5, -limits.CLOCK_SKEW_MAX_S - 5):
        assert answer_to(scene, signed(node.round_id, 1000 * late_s)) == (401, "request_expired")


def test_replayed_request_is_refused(scene: Scene, node: LightNode) -> None:
    request = node.sealed("/v1/leases/return", ReturnLeases(lease_ids=()))
    assert scene.coordinator.http.post("/v1/leases/return", content=request).status_code == 200
    assert answer_to(scene, request) == (409, "nonce_replayed")


def test_stranger_who_never_registered_gets_and_gives_nothing(scene: Scene, node: LightNode, lease: Lease) -> None:
    with closing(LightNode(scene.coordinator.join_string)) as stranger:
        for path, message in (
            ("/v1/leases", LeaseRequest(version=1, groups=1)),
            ("/v1/rollouts", Submission(rollouts=(stranger.answer(lease),))),
        ):
            assert refusal_of(stranger, path, message) == "unknown_node"
    assert stranger.key.node_id not in scene.coordinator.leaderboard()


@pytest.mark.parametrize("path", ["/v1/learner/state", "/v1/learner/batches/1", "/v1/learner/finish"])
def test_learners_door_is_shut_to_everybody_else(scene: Scene, path: str) -> None:
    for token in (b"", b"Bearer", b"Bearer " + b"0" * 64, b"Bearer \xc3\xa9", b"Bearer \xff"):
        headers = [(b"Authorization", token)]
        response = scene.coordinator.http.request("POST" if "finish" in path else "GET", path, headers=headers)
        assert (response.status_code, canonical.decode(response.content)["code"]) == (401, "not_authorised")


def test_learners_upload_may_be_larger_than_any_message(scene: Scene) -> None:
    """Weights are; the operator's own learner is believed about sizes."""
    weights = bytes(limits.REQUEST_MAX_BYTES + 1)
    address = f"/v1/learner/uploads/1000/model.safetensors?digest={chunks.digest(weights)}"
    response = scene.operator.client._http.put(address, content=weights)
    assert response.status_code == 204
    assert (scene.coordinator.folder / "uploads" / "1000" / "model.safetensors").stat().st_size == len(weights)


def test_bodies_that_are_no_message_are_refused_by_name(scene: Scene) -> None:
    chaos = b"".join(chunk.to_bytes(4, "little") for chunk in range(0, 2**32, 2**32 // 4_000))
    bombs = {
        "malformed_message": [
            b"",
            b"{}",
            chaos,
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
        ],
        "message_too_large": [
            b"\x91" * 10_000,
            b"\x91" * 1_000_000,
            b"\x81\xa1a" * 5_000,
            b"\xdd\x00\x03\x0d\x40" + b"\xc0" * 200_000,
        ],
        "not_canonical": [b"\xc1", b"\xd4\x00\x00", b"\xca\x00\x00\x00\x00"],
    }
    for code, bodies in bombs.items():
        for body in bodies:
            status, got = answer_to(scene, body)
            assert (status, got) == (ERRORS[code].http_status, code), body[:20]


def answer_to(scene: Scene, body: bytes, path: str = "/v1/leases/return") -> tuple[int, str]:
    """Status and error code of a raw body."""
    response = scene.coordinator.http.post(path, content=body)
    return response.status_code, canonical.decode(response.content)["code"]


LONG = Sample(tokens=bytes(4 * limits.TOKENS_MAX), logprobs=bytes(4 * limits.TOKENS_MAX), finish="stop")
"""Thirty of them are just below the largest message."""


def test_a_hundred_megabytes_are_refused_and_memory_stays_flat(scene: Scene, node: LightNode) -> None:
    node.beat()  # everything that is made on first use is made
    with resident_growth(scene.coordinator.program.process.pid) as growth:
        for _ in range(3):
            assert flood(scene, declared=True) == (413, "message_too_large")
            assert flood(scene, declared=False) == (413, "message_too_large")
            assert unfold(scene) == (400, "malformed_message")  # nobody unpacks it
    assert growth() < FLOOD_GROWTH_MAX, f"the coordinator grew by {growth() / limits.MIB:.0f} MiB"


def test_largest_message_that_may_be_sent_costs_a_bounded_number_of_copies(
    scene: Scene, node: LightNode, lease: Lease
) -> None:
    with resident_growth(scene.coordinator.program.process.pid) as growth:
        for _ in range(5):
            assert code_of(node, sealed(node, lease, samples=(LONG,) * 30)) == "message_too_large"
    assert growth() < COPIES_MAX * limits.MESSAGE_MAX_BYTES, f"the coordinator grew by {growth() / limits.MIB:.0f} MiB"


def flood(scene: Scene, *, declared: bool) -> tuple[int, str]:
    """Send a hundred megabytes, announced by length or in chunks without end, until the coordinator has had enough."""
    host, _, port = scene.coordinator.address.partition(":")
    length = f"Content-Length: {HUGE}" if declared else "Transfer-Encoding: chunked"
    head = f"POST /v1/rollouts HTTP/1.1\r\nHost: {host}\r\nAccept: application/json\r\n{length}\r\n\r\n"
    piece = bytes(limits.MIB) if declared else b"100000\r\n" + bytes(limits.MIB) + b"\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode())
        sent = 0
        while sent < HUGE and not select.select([connection], [], [], 0)[0]:
            try:
                connection.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                break
            sent += limits.MIB
        reply = b""
        while b"}" not in reply and (part := connection.recv(65536)):
            reply += part
    status = int(reply.split()[1])
    return status, str(json.loads(reply.partition(b"\r\n\r\n")[2])["code"])


def unfold(scene: Scene) -> tuple[int, str]:
    """Send a hundred kilobytes that are a hundred megabytes once they are unpacked."""
    packed = gzip.compress(bytes(HUGE))
    response = scene.coordinator.http.post("/v1/rollouts", content=packed, headers={"Content-Encoding": "gzip"})
    return response.status_code, canonical.decode(response.content)["code"]


@contextmanager
def resident_growth(pid: int) -> Iterator["Growth"]:
    """Measure the largest growth of a process's resident memory within the block."""
    growth = Growth(pid)
    growth.start()
    try:
        yield growth
    finally:
        growth.stop()


class Growth(threading.Thread):
    """Looks at a process's memory every few milliseconds; called, it says by how much it grew at most."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="growth")
        self._process = psutil.Process(pid)
        self._before = self._highest = self._now()
        self._enough = threading.Event()

    def run(self) -> None:
        while not self._enough.wait(0.005):
            self._highest = max(self._highest, self._now())

    def stop(self) -> None:
        self._enough.set()
        self.join()

    def __call__(self) -> int:
        return self._highest - self._before

    def _now(self) -> int:
        return int(self._process.memory_info().rss)
