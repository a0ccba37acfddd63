"""Requests of free keys that are dear to decode: what they cost is counted, and the writer decodes nothing of them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from protocol import canonical, limits
from protocol.messages import LeaseProgress, LeaseProgressReply
from protocol.signing import NodeKey
from tests.coordinator.counting import Work, counted
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio

VALUES = 99_900
"""One-byte values of an envelope, just below what any message may have."""

FLOOD = [0] * VALUES

STATEMENTS_MAX = 16
"""That the writer runs for a request of which nothing can be accepted."""

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
    """As many envelopes as a request may have, each as dear as it may be."""
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
