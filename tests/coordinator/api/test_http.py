"""The HTTP layer: every failure has a name and a status, and no body costs more than its limit."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientResponse, web
from tuf.ngclient import Updater
from yarl import URL

from coordinator.api import learner, nodes
from coordinator.reports.summary import leaderboard
from ledger import store
from protocol import limits
from protocol.errors import ERRORS
from protocol.people.owner import Delegation, Revocation, seal_statement
from protocol.policy.chunks import chunk_id
from protocol.policy.origin import OriginList, chunk_path
from protocol.wire import canonical
from protocol.wire.message import Message
from protocol.wire.signing import NodeKey
from protocol.work.learning import LearnerProgress, LearnerState, TrainingBatch, UpdateReport
from protocol.work.messages import (
    FetchPlan,
    Heartbeat,
    HeartbeatReply,
    LeaseProgress,
    LeaseReply,
    LeaseRequest,
    PlanRequest,
    Register,
    ReturnLeases,
    Submission,
    Transfer,
)
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio

TRICKS = (
    "..%2f..%2foperator.token", "%2e%2e%2fkeys%2ftimestamp.pem", "..%5cstate.db", "%2fetc%2fpasswd", "%2e%2e",
    "timestamp.json%00", "%00", ".timestamp.json", "a" * 300, "%ff", "timestamp.json%2f", "9.root.json",
)  # fmt: skip
"""Names that try to leave the metadata folder, or to break what reads it."""

WRONG_SHELF = f"/v1/chunks/01/{'0' * 64}"

MB = 1_000_000
ASK = LeaseRequest(version=1, groups=1)
BEAT = Heartbeat(
    session="0" * 16,
    version=0,
    phase="idle",
    tokens_per_s=1.0,
    transfer=Transfer(from_peers=1, from_seeder=2, from_http=3, to_peers=4),
    blames=(),
    reached=(),
)


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as here:
        yield here


def addresses(routes: web.RouteTableDef) -> list[str]:
    return [route.path for route in routes if isinstance(route, web.RouteDef)]


async def refused(response: ClientResponse, code: str) -> dict[str, Any]:
    """The reply is that error, in MessagePack, with that error's status; return it."""
    assert response.content_type == "application/msgpack"
    error = canonical.decode(await response.read())
    assert error["code"] == code, error
    assert response.status == ERRORS[code].http_status
    assert error["message"]
    assert isinstance(error, dict)
    return error


class TestTheWholeWay:
    """Requests of honest clients."""

    async def test_a_node_is_credited_and_the_learner_gets_its_batch(self, served: Served) -> None:
        await served.publish()
        key = await served.join()
        given = await served.lease(key, groups=2)
        verdicts = await served.submit(key, *[served.answer(key, lease) for lease in given])
        assert [(verdict.outcome, verdict.credit_micros) for verdict in verdicts] == [("accepted", 6)] * 2
        again = await served.submit(key, served.answer(key, given[0]))
        assert [verdict.outcome for verdict in again] == ["already_accepted"]

        response = await served.client.get("/v1/learner/batches/1", headers=served.operator)
        batch = TrainingBatch.from_bytes(await response.read())
        assert len(batch.groups) == 2
        report = UpdateReport(number=1, mismatched=(batch.groups[0].claim_id,), metrics={}, idle_s=1.0, busy_s=1.0)
        for _ in range(2):
            posted = await served.client.post("/v1/learner/reports", data=report.to_bytes(), headers=served.operator)
            assert posted.status == 204
        (line,) = (await (await served.client.get("/v1/leaderboard")).json())["nodes"]
        assert (line["posted_micros"], line["voided_micros"], line["pending_micros"]) == (0, 0, 12)
        told = await served.client.get("/v1/operator/status", headers=served.operator)
        assert (await told.json())["backlog"] == 1

    async def test_a_node_gives_back_beats_and_plans(self, served: Served) -> None:
        await served.publish()
        key, other = await served.join(1), await served.join(2)
        (lease,) = await served.lease(key)
        await served.call(key, "/v1/leases/return", ReturnLeases(lease_ids=(lease.lease_id,)), HeartbeatReply)
        assert (await served.lease(other))[0].prompt == lease.prompt
        hint = await served.call(key, "/v1/heartbeat", BEAT, HeartbeatReply)
        assert (hint.newest_version, hint.finished) == (1, False)
        plan = await served.call(key, "/v1/plan", PlanRequest(version=1), FetchPlan)
        assert [peer.peer_id for peer in plan.peers] == [other.node_id]

    async def test_two_agents_with_one_key_are_both_told_so_and_both_count_as_alive(self, served: Served) -> None:
        key = await served.join(1)
        other = BEAT.model_copy(update={"session": "1" * 16, "tokens_per_s": 7.0})
        for beat in (BEAT, other):
            await served.call(key, "/v1/heartbeat", beat, HeartbeatReply)
        for beat in (BEAT, other):
            await refused(await served.post("/v1/heartbeat", served.sealed(key, "/v1/heartbeat", beat)), "key_in_use")
        (line,) = (await (await served.client.get("/v1/leaderboard")).json())["nodes"]
        assert line["tokens_per_s"] == 7.0, "a heartbeat counts, whatever its answer is"

    async def test_a_revoked_key_is_refused_whatever_it_says_of_leases(self, served: Served) -> None:
        await served.publish()
        key, owner = await served.join(), NodeKey(bytes([7]) * 32)
        (lease,) = await served.lease(key)
        given = seal_statement(owner, Delegation(node_id=key.node_id, number=1))
        joined = Register(name="n1", price_micros_per_mtok=1, addresses=(), agent="", delegation=given)
        await served.call(key, "/v1/nodes", joined, HeartbeatReply)
        over = seal_statement(owner, Revocation(node_id=key.node_id, number=2))
        assert (await served.post("/v1/owners", over)).status == 200
        words: dict[str, Message] = {
            "/v1/leases": ASK,
            "/v1/leases/return": ReturnLeases(lease_ids=(lease.lease_id,)),
            "/v1/leases/progress": LeaseProgress(held=(lease.lease_id,), fragments=()),
            "/v1/rollouts": Submission(rollouts=(served.answer(key, lease),)),
            "/v1/heartbeat": BEAT,
        }
        for path, message in words.items():
            await refused(await served.post(path, served.sealed(key, path, message)), "key_revoked")

    async def test_a_node_that_names_ever_other_versions_has_no_plan_made_anew(self, served: Served) -> None:
        await served.publish()
        key = await served.join(1)
        await served.call(key, "/v1/plan", PlanRequest(version=1), FetchPlan)
        planned = served.round.plans._topology
        for version in (2, 3, limits.VERSION_MAX):
            await served.call(key, "/v1/plan", PlanRequest(version=version), FetchPlan)
        assert served.round.plans._topology is planned

    async def test_the_learner_uploads_a_model_larger_than_any_message(self, served: Served) -> None:
        weights = bytes(limits.REQUEST_MAX_BYTES + 1)
        await served.publish(weights=weights)
        assert served.round.publisher.read_file(1, "model.safetensors") == weights
        response = await served.client.get(f"/v1/{chunk_path(chunk_id(bytes(1024)))}")
        assert (response.status, await response.read()) == (200, bytes(1024))

    async def test_nodes_are_told_of_the_origins(self, tmp_path: Path) -> None:
        urls = ("https://cdn.example/round-1", "http://127.0.0.1:9000")
        async with serve(tmp_path, f"publish.origins={list(urls)}") as served:
            response = await served.client.get("/v1/origins")
            assert OriginList.from_bytes(await response.read()).urls == urls

    async def test_a_learner_that_comes_back_learns_where_it_stands(self, served: Served) -> None:
        entries = await served.round.database.read(store.size)
        await served.publish()
        response = await served.client.get("/v1/learner/state", headers=served.operator)
        state = LearnerState.from_bytes(await response.read())
        assert (state.newest_version, state.newest_update, state.finished) == (1, 0, False)
        assert state.ledger_size == entries + 1, "the version"

    async def test_a_batch_is_handed_out_the_moment_it_is_full(self, served: Served) -> None:
        await served.publish()
        key = await served.join()
        given = await served.lease(key, groups=2)
        waiting = asyncio.create_task(served.client.get("/v1/learner/batches/1", headers=served.operator))
        for lease in given:
            await served.submit(key, served.answer(key, lease))
        async with asyncio.timeout(5):
            response = await waiting
        assert len(TrainingBatch.from_bytes(await response.read()).groups) == 2

    async def test_a_node_that_is_ahead_hears_of_the_next_version(self, served: Served) -> None:
        await served.publish()
        key = await served.join()
        await served.lease(key, groups=8)
        await served.lease(key, groups=8)
        waiting = asyncio.create_task(served.call(key, "/v1/leases", ASK, LeaseReply))
        await served.publish(2)
        reply = await waiting
        assert (reply.leases, reply.newest_version) == ((), 2)

    async def test_an_answer_that_arrives_after_the_end_is_paid_like_every_other(self, served: Served) -> None:
        """The lease was valid when the round ended; no later settlement would pay for it."""
        await served.publish()
        key = await served.join()
        early, late = await served.lease(key, groups=2)
        await served.submit(key, served.answer(key, early))
        assert (await served.client.post("/v1/learner/finish", headers=served.operator)).status == 204
        (verdict,) = await served.submit(key, served.answer(key, late))
        assert verdict.outcome == "accepted"
        reply = await served.call(key, "/v1/leases", ASK, LeaseReply)
        assert reply.reason == "finished"
        (line,) = await served.round.database.run(leaderboard)
        assert (line["posted_micros"], line["pending_micros"]) == (12, 0)

    async def test_progress_is_remembered_field_by_field(self, served: Served) -> None:
        for message in (
            LearnerProgress(phase="learning", fraction=0.0, detail="", accuracy_before=0.25),
            LearnerProgress(phase="learning", fraction=0.5, detail="half"),
        ):
            await served.client.post("/v1/learner/progress", data=message.to_bytes(), headers=served.operator)
        status = await (await served.client.get("/v1/status")).json()
        assert (status["fraction"], status["detail"], status["accuracy_before"]) == (0.5, "half", 0.25)

    async def test_a_restart_loses_nothing_and_keeps_its_name(self, tmp_path: Path) -> None:
        async with serve(tmp_path) as first:
            await first.publish()
            key = await first.join()
            (lease,) = await first.lease(key)
            envelope = first.answer(key, lease)
            await first.submit(key, envelope)
            before = (first.round.round_id, first.round.operator_token)
            board = await first.round.database.run(leaderboard)
        async with serve(tmp_path) as second:
            assert (second.round.round_id, second.round.operator_token) == before
            assert await second.round.database.run(leaderboard) == board
            (verdict,) = await second.submit(key, envelope)
            assert verdict.outcome == "already_accepted"


class TestStrangers:
    """Requests that are refused, each by its name."""

    async def test_a_replayed_request_is_refused(self, served: Served) -> None:
        key = await served.join()
        request = served.sealed(key, "/v1/heartbeat", BEAT)
        assert (await served.post("/v1/heartbeat", request)).status == 200
        await refused(await served.post("/v1/heartbeat", request), "nonce_replayed")

    async def test_a_request_signed_for_another_address_is_refused(self, served: Served) -> None:
        key = await served.join()
        request = served.sealed(key, "/v1/heartbeat", BEAT)
        error = await refused(await served.post("/v1/plan", request), "wrong_audience")
        assert "another address" in error["message"]
        assert error["hint"] == "Sign the address that you call, from /v1/ on."

    @pytest.mark.parametrize("late_s", [100, -100])
    async def test_an_old_request_and_one_from_the_future_are_refused(self, served: Served, late_s: int) -> None:
        request = served.sealed(NodeKey(b"1" * 32), "/v1/heartbeat", BEAT, late_ms=late_s * 1000)
        await refused(await served.post("/v1/heartbeat", request), "request_expired")

    async def test_a_forged_request_is_refused(self, served: Served) -> None:
        request = bytearray(served.sealed(NodeKey(b"1" * 32), "/v1/heartbeat", BEAT))
        request[-1] ^= 1
        await refused(await served.post("/v1/heartbeat", bytes(request)), "bad_signature")

    async def test_garbage_is_refused_at_every_address(self, served: Served) -> None:
        await served.publish()
        for path in set(addresses(nodes.routes)) - {"/v1/probe/upload"}:  # whose body is any bytes
            for data in (b"", b"{}", b"\xc1", b"\xdd\xff\xff\xff\xff"):
                response = await served.post(path, data)
                assert response.status in (400, 413)
                assert canonical.decode(await response.read())["code"] in ERRORS

    async def test_a_compressed_body_is_not_unpacked(self, served: Served) -> None:
        key = NodeKey(b"1" * 32)
        message = Register(name="n", price_micros_per_mtok=0, addresses=(), agent="")
        packed = gzip.compress(served.sealed(key, "/v1/nodes", message))
        for data in (packed, b"no gzip at all"):
            response = await served.client.post("/v1/nodes", data=data, headers={"Content-Encoding": "gzip"})
            assert response.status == 400

    async def test_a_node_that_never_registered_gets_nothing(self, served: Served) -> None:
        await served.publish()
        key = NodeKey(b"s" * 32)
        asked = {
            "/v1/heartbeat": BEAT,
            "/v1/leases": ASK,
            "/v1/plan": PlanRequest(version=1),
            "/v1/rollouts": Submission(rollouts=(b"x",)),
        }
        for path, message in asked.items():
            await refused(await served.post(path, served.sealed(key, path, message)), "unknown_node")

    async def test_a_price_above_the_rounds_is_refused(self, served: Served) -> None:
        message = Register(name="n", price_micros_per_mtok=10**10, addresses=(), agent="")
        request = served.sealed(NodeKey(b"1" * 32), "/v1/nodes", message)
        await refused(await served.post("/v1/nodes", request), "price_too_high")

    async def test_before_the_first_version_there_is_no_work(self, served: Served) -> None:
        key = await served.join()
        await refused(await served.post("/v1/leases", served.sealed(key, "/v1/leases", ASK)), "not_found")

    async def test_one_bad_rollout_does_not_cost_the_others_their_credit(self, served: Served) -> None:
        await served.publish()
        key = await served.join()
        (lease,) = await served.lease(key)
        bomb = key.seal("rollout", canonical.encode({"n" * limits.STRING_MAX_BYTES: 1}))
        verdicts = await served.submit(key, b"garbage", bomb, served.answer(key, lease))
        assert [verdict.outcome for verdict in verdicts] == ["rejected", "rejected", "accepted"]

    async def test_an_address_that_is_not_there_is_named(self, served: Served) -> None:
        for path in ("/v1/chunks/../state.db", "/v1/chunks/xyz", WRONG_SHELF, "/v1/%ff%fe"):
            await refused(await served.client.get(URL(path, encoded=True)), "not_found")
        for path in ("/nothing", "/%00", "/%7f"):
            response = await served.client.get(URL(path, encoded=True))
            assert (response.status, (await response.json())["code"]) == (404, "not_found")

    async def test_a_person_gets_errors_as_json(self, served: Served) -> None:
        response = await served.client.get("/v1/nothing", headers={"Accept": "text/html"})
        assert (response.status, (await response.json())["code"]) == (404, "not_found")

    async def test_a_client_that_reads_no_msgpack_gets_json(self, served: Served) -> None:
        for path, accepted in (("/nope", "*/*"), ("/v1", "*/*"), ("/v1/nope", "text/plain"), ("/v1/nope", "text/*")):
            response = await served.client.get(path, headers={"Accept": accepted})
            assert (response.status, (await response.json())["code"]) == (404, "not_found"), path
        for accepted in ("*/*", "application/msgpack", "application/*"):
            response = await served.client.get("/v1/nope", headers={"Accept": accepted})
            assert response.content_type == "application/msgpack", accepted

    async def test_a_client_of_the_endpoint_without_v1_in_its_address_reads_that(self, served: Served) -> None:
        by_json = await served.client.post("/completions", json={"prompt": "a"})
        by_key = await served.client.get("/models", headers={"Authorization": "Bearer es-abc"})
        for response in (by_json, by_key):
            assert (response.status, (await response.json())["code"]) == (404, "not_found")
            assert (await response.json())["hint"] == "The base URL of the endpoint ends with /v1."
            assert "the endpoint has /v1/completions, " in (await response.json())["message"]

    async def test_a_browser_at_a_wrong_address_gets_a_page(self, served: Served) -> None:
        for path in ("/nothing", "/static/nothing.js"):
            response = await served.client.get(path, headers={"Accept": "text/html"})
            assert (response.status, response.content_type) == (404, "text/html")
            assert f"There is nothing at {path}." in await response.text()

    async def test_an_unknown_chunk_is_named(self, served: Served) -> None:
        await refused(await served.client.get(f"/v1/chunks/00/{'0' * 64}"), "unknown_chunk")

    async def test_a_document_name_that_leaves_its_folder_is_nothing(self, served: Served) -> None:
        for name in TRICKS:
            await refused(await served.client.get(URL(f"/v1/metadata/{name}", encoded=True)), "not_found")

    async def test_trust_documents_are_served_and_only_the_timestamp_is_never_cached(self, served: Served) -> None:
        for name, caching in (("timestamp.json", "no-store"), ("1.root.json", "immutable")):
            response = await served.client.get(f"/v1/metadata/{name}")
            assert await response.read() == served.round.metadata.read(name)
            assert caching in response.headers["Cache-Control"]

    async def test_a_stock_tuf_client_finds_the_manifest_under_its_prefixed_name(
        self, served: Served, tmp_path: Path
    ) -> None:
        await served.publish(1)
        base = str(served.client.make_url("/v1/metadata/"))

        def download() -> bytes:
            (tmp_path / "tuf").mkdir()
            updater = Updater(
                str(tmp_path / "tuf"), base, str(tmp_path), base, bootstrap=served.round.metadata.read("1.root.json")
            )
            target = updater.get_targetinfo("policy-000000000001.manifest")
            assert target is not None
            return Path(updater.download_target(target)).read_bytes()

        assert await asyncio.to_thread(download) == served.round.metadata.read("policy-000000000001.manifest")

    async def test_a_manifest_is_not_served_under_another_hash(self, served: Served) -> None:
        await served.publish(1)
        await refused(await served.client.get(f"/v1/metadata/{'0' * 64}.policy-000000000001.manifest"), "not_found")

    async def test_what_a_node_calls_itself_is_only_text(self, served: Served) -> None:
        name = "<script>alert(1)</script>\u202e"
        message = Register(name=name, price_micros_per_mtok=0, addresses=(), agent="")
        await served.call(NodeKey(b"1" * 32), "/v1/nodes", message, HeartbeatReply)
        response = await served.client.get("/v1/leaderboard")
        assert response.content_type == "application/json"
        assert (await response.json())["nodes"][0]["name"] == "<script>alert 1 </script>"
        page = await served.client.get("/leaderboard")
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert "<script>alert" not in await page.text()

    async def test_rates_whose_sum_is_no_number_do_not_break_the_board_for_all(self, served: Served) -> None:
        owner = NodeKey(b"o" * 32)
        for number in (1, 2):
            key = NodeKey(number.to_bytes(32))
            word = seal_statement(owner, Delegation(node_id=key.node_id, number=number))
            joining = Register(name="n", price_micros_per_mtok=0, addresses=(), agent="", delegation=word)
            await served.call(key, "/v1/nodes", joining, HeartbeatReply)
            boast = BEAT.model_copy(update={"tokens_per_s": 1e308})
            await served.post("/v1/heartbeat", served.sealed(key, "/v1/heartbeat", boast))
        assert (await served.client.get("/leaderboard?view=owners")).status == 200
        assert (await served.client.get("/")).status == 200
        told = await (await served.client.get("/stats/owners.json")).text()
        json.loads(told, parse_constant=pytest.fail)

    async def test_the_coordinator_lives_through_it_all(self, served: Served) -> None:
        assert (await served.client.get("/healthz")).status == 200


class TestTheOperatorsDoor:
    """The learner's endpoints reject everybody else."""

    async def test_an_operators_address_needs_the_token(self, served: Served) -> None:
        token = served.round.operator_token
        tried = (
            None,
            "",
            "Bearer",
            "Bearer ",
            "Bearer 0",
            "Basic 0",
            "\xff\xfe",
            f"Bearer {token[:-1]}",
            f"Basic {token}",
        )
        for route in learner.routes:
            assert isinstance(route, web.RouteDef)
            path = route.path.replace("{version:[0-9]+}", "1").replace("{number:[0-9]+}", "1").replace("{name}", "f")
            for header in tried:
                headers = {} if header is None else {"Authorization": header}
                response = await served.client.request(route.method, path, headers=headers, data=b"x")
                await refused(response, "not_authorised")
        assert not served.round.publisher.uploads.exists()

    async def test_an_upload_cannot_leave_its_folder(self, served: Served) -> None:
        for name in ("..%2fescape", "%2e%2e", ".hidden", "a%00b", "a" * 200, "%2fetc"):
            url = URL(f"/v1/learner/uploads/1/{name}", encoded=True)
            response = await served.client.put(url, data=b"x", headers=served.operator)
            assert response.status in (400, 404)
        assert not served.round.publisher.uploads.exists()

    async def test_an_out_of_order_step_is_refused(self, served: Served) -> None:
        await refused(await served.client.get("/v1/learner/batches/7", headers=served.operator), "out_of_order")
        report = UpdateReport(number=1, mismatched=(), metrics={}, idle_s=0.0, busy_s=0.0)
        posted = await served.client.post("/v1/learner/reports", data=report.to_bytes(), headers=served.operator)
        await refused(posted, "out_of_order")

    async def test_publishing_again_is_harmless(self, served: Served) -> None:
        await served.publish()
        timestamp = served.round.metadata.read("timestamp.json")
        await served.publish()
        assert served.round.metadata.read("timestamp.json") == timestamp


@pytest.mark.parametrize(
    ("settings", "passed", "refused"),
    [
        (
            (),
            ("localhost:8700", "127.0.0.1", "[::1]:8700", "192.168.1.7:8700", "203.0.113.9", "box", "box.local", ""),
            ("evil.example.org", "evil.example.org.:8700", "127.0.0.1.evil.example.org", "a@evil.example.org", "[::1"),
        ),
        (("round.public_url=http://swarm.lan:8700",), ("swarm.lan", "127.0.0.1:8700"), ("evil.example.org:8700",)),
        (('round.hosts=["GPU1.corp.example.com"]',), ("gpu1.corp.example.com:8700", "box"), ("corp.example.com",)),
        (("round.public_url=https://swarm.example.org",), ("swarm.example.org", "alias.example.org", "10.0.0.1"), ()),
    ],
    ids=["loopback", "private name", "names of a network", "public"],
)
async def test_a_page_of_another_site_cannot_read_a_private_round_under_its_own_name(
    tmp_path: Path, settings: tuple[str, ...], passed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    """DNS rebinding: the browser sends the name of the site, which now leads to an address of this network."""
    async with serve(tmp_path, *settings) as served:
        for path in ("/", "/v1/leaderboard"):
            for host in passed:
                answer = await served.client.get(path, headers={"Host": host})
                assert answer.status == 200, (path, host)
            for host in refused:
                answer = await served.client.get(path, headers={"Host": host, "Accept": "application/json"})
                assert answer.status == 421, (path, host)
                said = await answer.json()
                assert said["code"] == "misdirected"
                assert "The operator can allow this name in round.hosts" in said["hint"]
