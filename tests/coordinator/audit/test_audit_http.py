"""Audits over HTTP: auditors need the operator's token, nodes see their own leases, draws are secret until revealed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from coordinator.audit.auditor import Auditor
from coordinator.audit.case import RoundArchive
from coordinator.base.clock import now_ms
from coordinator.model.watchdog import Watchdog
from coordinator.rules.calibration import Calibration
from coordinator.store.facts import FINISHED, set_fact
from coordinator.store.tables import audits
from protocol.wire import canonical
from protocol.wire.signing import NodeKey
from protocol.work.auditing import Cases, Explanations, HoldCases, Judged, TakeCases, Verdicts, Why
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio

TAKE = TakeCases(auditor="a", at_most=8)


@pytest_asyncio.fixture
async def audited(tmp_path: Path) -> AsyncIterator[Served]:
    """A round whose every claim is drawn, with an epoch that ends with the second."""
    async with serve(tmp_path, "audit.first_groups=10", "audit.floor=1", "audit.epoch_groups=2") as made:
        await made.publish()
        yield made


async def earn(served: Served, groups: int = 1) -> tuple[NodeKey, list[str]]:
    """A node, and the leases that it has answered."""
    key = await served.join()
    given = await served.lease(key, groups=groups)
    await served.submit(key, *[served.answer(key, lease) for lease in given])
    return key, [lease.lease_id for lease in given]


async def take(served: Served) -> Cases:
    response = await served.client.post("/v1/auditor/take", data=TAKE.to_bytes(), headers=served.operator)
    assert response.status == 200
    return Cases.from_bytes(await response.read())


async def why(served: Served, key: NodeKey, about: str = "") -> Explanations:
    return await served.call(key, "/v1/verdicts", Why(about=about), Explanations)


@pytest.mark.parametrize("path", ["/v1/auditor/take", "/v1/auditor/hold", "/v1/auditor/verdicts"])
async def test_a_stranger_cannot_audit(audited: Served, path: str) -> None:
    response = await audited.client.post(path, data=TAKE.to_bytes())
    assert response.status == 401


@pytest.mark.parametrize("body", [b"", b"\xc1", canonical.encode({"auditor": "", "at_most": 10**9})])
async def test_garbage_from_an_auditor_has_a_name(audited: Served, body: bytes) -> None:
    for path in ("/v1/auditor/take", "/v1/auditor/hold", "/v1/auditor/verdicts"):
        response = await audited.client.post(path, data=body, headers=audited.operator)
        assert response.status == 400


async def test_an_auditor_that_says_that_it_is_at_work_keeps_its_cases_for_the_whole_time_anew(audited: Served) -> None:
    await earn(audited)
    assert len((await take(audited)).cases) == 1

    async def until_ms() -> int:
        columns = sa.select(audits.c.taken_by, audits.c.taken_until_ms)
        row = await audited.round.database.read(lambda connection: connection.execute(columns).one())
        assert row.taken_by == TAKE.auditor
        return int(row.taken_until_ms)

    async def hold(name: str) -> None:
        body = HoldCases(auditor=name).to_bytes()
        response = await audited.client.post("/v1/auditor/hold", data=body, headers=audited.operator)
        assert response.status == 204

    before_ms = await until_ms()
    await hold("somebody else")
    assert await until_ms() == before_ms
    async with asyncio.timeout(60):
        while await until_ms() == before_ms:  # as long as the clock has not moved
            await hold(TAKE.auditor)
    assert await until_ms() > before_ms


async def test_a_verdict_and_its_evidence_reach_the_node_and_nobody_else(audited: Served) -> None:
    key, (lease_id,) = await earn(audited)
    assert [told.finding for told in (await why(audited, key)).explanations] == ["waiting"]
    (case,) = (await take(audited)).cases
    report = b'{"outcome": "hard fail"}'
    verdict = Judged(claim_id=case.claim_id, finding="hard", validator="replay/1", report=report)
    for _ in range(2):
        body = Verdicts(verdicts=(verdict,)).to_bytes()
        response = await audited.client.post("/v1/auditor/verdicts", data=body, headers=audited.operator)
        assert response.status == 204
    for about in (lease_id, case.claim_id):
        found = await why(audited, key, about)
        (told,) = found.explanations
        assert (told.state, told.code, told.finding, told.report) == ("voided", "replay_mismatch", "hard", report)
        assert (told.lease, told.rollout) == (case.lease, case.rollout)
        assert b"torch/bf16/cpu" in found.tolerances
    stranger = await audited.join(2)
    response = await audited.post("/v1/verdicts", audited.sealed(stranger, "/v1/verdicts", Why(about=lease_id)))
    assert b"unknown_lease" in await response.read()
    assert (await why(audited, stranger)).explanations == ()


async def test_draws_are_shown_when_their_epoch_is_over(audited: Served) -> None:
    await earn(audited)
    assert (await audited.client.get("/v1/audits/1")).status == 404
    await earn(audited)
    listed = await (await audited.client.get("/v1/audits/1")).json()
    assert [rate for _, rate in listed] == [10**6] * 2
    assert (await audited.client.get("/v1/audits/2")).status == 404


async def test_whether_a_claim_was_drawn_is_not_told_to_its_node_before_the_reveal(tmp_path: Path) -> None:
    """Else a node learns at once, claim by claim, what it got away with, and works the next ones accordingly."""
    rates = ("audit.first_groups=0", "audit.floor=1e-6", "audit.trusted_floor=1e-6", "audit.escrow_factor=0")
    async with serve(tmp_path, *rates, "audit.epoch_groups=2") as served:
        await served.publish()
        key, _ = await earn(served)
        assert (await take(served)).cases == (), "not drawn, by all odds"
        assert [told.finding for told in (await why(served, key)).explanations] == ["waiting"], "as if it was"
        await earn(served)
        assert [told.finding for told in (await why(served, key)).explanations] == ["", ""], "revealed"


async def test_the_public_figures_do_not_tell_that_a_claim_was_drawn_before_the_reveal(audited: Served) -> None:
    """Else a node reads the count after each of its claims, and knows; the operator sees all that waits."""

    async def fresh(path: str) -> dict[str, Any]:
        """Return the current answer, not one that was computed for an earlier request."""
        asked_ms, found = now_ms(), {"as_of_ms": 0}
        while found["as_of_ms"] < asked_ms:
            found = await (await audited.client.get(path, headers=audited.operator)).json()
        return found

    for accepted, shown in ((1, 0), (2, 2), (3, 2)):
        await earn(audited)
        told = await fresh("/v1/status")
        assert (told["audit"]["waiting"], "backlog" in told) == (shown, False), f"after {accepted}, two to an epoch"
        metrics = await (await audited.client.get("/metrics")).text()
        assert f'echo_swarm_audits{{state="waiting"}} {shown:.1f}' in metrics
        assert (await fresh("/v1/operator/status"))["backlog"] == accepted
    assert (await audited.client.get("/v1/operator/status")).status == 401


class Slow(Auditor):
    """An auditor that takes as long as a test wants; only its duration is fake."""

    def __init__(self, *given: Any, ends: Event) -> None:
        super().__init__(*given)
        self._ends = ends
        self._watchdog = Watchdog(0)  # it would end the test's process if the machine stood still for three seconds

    def _judge(self, taken: Cases, tolerances: Calibration) -> list[Judged]:
        self._ends.wait()
        return super()._judge(taken, tolerances)


async def test_a_slow_auditor_is_no_lost_one_however_many_others_ask(tmp_path: Path) -> None:
    async with serve(tmp_path, "audit.first_groups=10", "audit.timeout_s=3") as served:
        await served.publish()
        await earn(served)
        columns, ends = sa.select(audits.c.tries, audits.c.taken_until_ms, audits.c.finding, audits.c.report), Event()

        async def case() -> Any:
            return await served.round.database.read(lambda connection: connection.execute(columns).one())

        (folder := tmp_path / "auditor").mkdir()
        url, token = str(served.client.make_url("")), served.round.operator_token
        with (
            closing(RoundArchive(served.round.config)) as archive,
            closing(Slow(served.round.config, archive, folder, "slow", url, token, ends=ends)) as auditor,
        ):
            at_work = asyncio.create_task(asyncio.to_thread(auditor.run))
            while not (first_ms := (await case()).taken_until_ms):
                assert not at_work.done()
            try:
                while (await case()).taken_until_ms < first_ms + 2 * served.round.audits.timeout_ms:
                    assert (await take(served)).cases == ()
                assert (await case()).tries == 0
            finally:
                ends.set()
            while (await case()).finding is None:
                assert not at_work.done()
            assert b"no auditor came back" not in (await case()).report
            await served.round.database.run(set_fact, FINISHED, True)
            await at_work
