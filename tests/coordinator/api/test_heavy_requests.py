"""Requests of free keys that are dear to decode: what they cost is counted, and the writer decodes nothing of them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from protocol import limits
from protocol.wire import canonical
from protocol.wire.signing import NodeKey
from protocol.work.messages import HeartbeatReply, LeaseProgress, LeaseProgressReply, ReturnLeases
from tests.coordinator.counting import Work, counted
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio

VALUES = 99_900
"""One-byte values of an envelope, just below what any message may have."""

FLOOD = [0] * VALUES

STATEMENTS_MAX = 16
"""The most statements that the writer runs for a request of which nothing can be accepted."""

VALUES_MAX = 5_000
"""Decoded for such a request, in all threads together."""


@pytest.fixture
def work() -> Any:
    with counted() as counting:
        yield counting


@pytest_asyncio.fixture
async def served(work: Work, tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as here:
        await here.publish()
        yield here


def naming(lease_id: str, **change: Any) -> bytes:
    """A payload that begins as claims and fragments do, and goes on as long as it may."""
    return canonical.encode({"lease_digest": "0" * 64, "lease_id": lease_id} | change)


def claims(key: NodeKey, kind: str, lease_id: str) -> tuple[bytes, ...]:
    """Return as many envelopes as a request may have, each as expensive as possible."""
    domain: Any = "fragment" if kind.startswith("fragment") else "rollout"
    payloads = {
        "values in place of an envelope": None,
        "values in place of a claim": canonical.encode(FLOOD),
        "samples that are values": naming("f" * 32, round_id="a" * 64, samples=FLOOD[:-10]),
        "own lease, samples that are values": naming(lease_id, round_id="a" * 64, samples=FLOOD[:-10]),
        "fragment of an own lease": naming(lease_id, parts=FLOOD[:-20], previous="", round_id="a" * 64),
        "fragment of an invented lease": naming("f" * 32, parts=FLOOD[:-20], previous="", round_id="a" * 64),
    }
    payload = payloads[kind]
    envelope = canonical.encode(FLOOD) if payload is None else key.seal(domain, payload)
    return (envelope,) * limits.LEASES_PER_REQUEST_MAX


@pytest.mark.parametrize(
    "kind",
    [
        "values in place of an envelope",
        "values in place of a claim",
        "samples that are values",
        "own lease, samples that are values",
    ],
)
async def test_a_request_of_six_million_values_is_not_decoded_by_the_writer(
    served: Served, work: Work, kind: str
) -> None:
    key = await served.join()
    (lease,) = await served.lease(key)
    envelopes = claims(key, kind, lease.lease_id)
    work.clear()
    verdicts = await served.submit(key, *envelopes)
    assert work.writer["values"] == work.writer["signatures"] == 0
    assert work.writer["statements"] <= STATEMENTS_MAX
    assert work.all["values"] <= VALUES_MAX
    assert len(verdicts) == len(envelopes)
    assert {verdict.outcome for verdict in verdicts} == {"rejected"}


@pytest.mark.parametrize("kind", ["fragment of an own lease", "fragment of an invented lease"])
async def test_fragments_of_six_million_values_are_not_decoded_by_the_writer(
    served: Served, work: Work, kind: str
) -> None:
    key = await served.join()
    (lease,) = await served.lease(key)
    message = LeaseProgress(held=(lease.lease_id,), fragments=claims(key, kind, lease.lease_id))
    work.clear()
    reply = await served.call(key, "/v1/leases/progress", message, LeaseProgressReply)
    assert reply.taken == ()
    assert work.writer["values"] == work.writer["signatures"] == 0
    assert work.writer["statements"] <= STATEMENTS_MAX
    assert work.all["values"] <= VALUES_MAX


@pytest.mark.parametrize("path", ["/v1/rollouts", "/v1/leases/progress", "/v1/nodes"])
async def test_a_request_that_is_nothing_but_values_is_hardly_read(served: Served, work: Work, path: str) -> None:
    work.clear()
    response = await served.post(path, canonical.encode(FLOOD[: 99_900 if path != "/v1/nodes" else 16_000]))
    assert response.status in (400, 413)
    assert work.all["values"] <= VALUES_MAX
    assert work.writer == {}


async def test_leases_that_were_never_given_out_are_returned_with_few_statements(served: Served, work: Work) -> None:
    key = await served.join()
    invented = tuple(f"{number:032x}" for number in range(limits.LEASES_PER_REQUEST_MAX))
    work.clear()
    await served.call(key, "/v1/leases/return", ReturnLeases(lease_ids=invented), HeartbeatReply)
    assert work.writer["statements"] <= STATEMENTS_MAX


async def test_several_rollouts_of_one_request_are_accepted_after_their_leases_were_looked_up(
    served: Served, work: Work
) -> None:
    key = await served.join()
    given = await served.lease(key, 4)
    envelopes = [served.answer(key, lease) for lease in given]
    work.clear()
    verdicts = await served.submit(key, *envelopes, envelopes[0], b"garbage")
    said = [(verdict.outcome, verdict.lease_id) for verdict in verdicts]
    assert said[:4] == [("accepted", lease.lease_id) for lease in given]
    assert said[4:] == [("already_accepted", given[0].lease_id), ("rejected", "")]
    assert work.writer["signatures"] == 0


async def test_an_envelope_larger_than_its_lease_can_be_answered_with_is_not_decoded(
    served: Served, work: Work
) -> None:
    key = await served.join()
    (lease,) = await served.lease(key)
    envelope = key.seal("rollout", naming(lease.lease_id, round_id="a" * 64, samples=[bytes(2**17)]))
    work.clear()
    (verdict,) = await served.submit(key, envelope)
    assert (verdict.code, verdict.lease_id) == ("message_too_large", "")
    assert work.all["signatures"] == 1  # that of the request
    (verdict,) = await served.submit(key, served.answer(key, lease))
    assert verdict.outcome == "accepted"
