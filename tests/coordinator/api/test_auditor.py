"""The auditor's calls over HTTP: a held claim waits until an auditor says that its class is calibrated."""

from pathlib import Path

import pytest

from protocol.work.auditing import Cases, Judged, TakeCases, Verdicts
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio

BF16 = "torch/bf16/cuda"


async def take(served: Served, *classes: str) -> list[str]:
    """Return the claims that an auditor gets."""
    message = TakeCases(auditor="one", at_most=8, classes=classes)
    response = await served.client.post("/v1/auditor/take", data=message.to_bytes(), headers=served.operator)
    return [case.claim_id for case in Cases.from_bytes(await response.read()).cases]


async def test_a_held_claim_is_given_out_again_once_its_class_is_calibrated(tmp_path: Path) -> None:
    async with serve(tmp_path, "audit.first_groups=8") as served:
        await served.publish()
        key = await served.join()
        (lease,) = await served.lease(key)
        await served.submit(key, served.answer(key, lease))
        (claim,) = await take(served)
        held = Judged(claim_id=claim, finding="held", validator="replay/7", report=b"{}", waits_for=BF16)
        message = Verdicts(verdicts=(held,))
        response = await served.client.post("/v1/auditor/verdicts", data=message.to_bytes(), headers=served.operator)
        assert response.status == 204, await response.read()
        assert await take(served, "torch/fp32/cpu", BF16) == [claim]
