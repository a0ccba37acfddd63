"""A node whose coordinator has too much to do."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from queue import Queue

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.errors import MalformedMessage, Overloaded, Unreachable, WrongAddress
from protocol.wire import canonical
from protocol.wire.signing import NodeKey
from protocol.work.messages import (
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    Submission,
    SubmissionReply,
    Verdict,
    VersionRequest,
)
from swarm_node.coordinator_api.client import TIMEOUT, Coordinator, offset_s
from swarm_node.coordinator_api.origin import RETRY_AFTER_MAX_S, PublicOnly
from swarm_node.coordinator_api.origins import open_origins
from tests.swarm_node.web import Handler, Web, web

LEASES, NEWS = "/v1/leases", "/v1/versions"


class Scene:
    """A coordinator that refuses until it has room, and a node's side of it."""

    def __init__(self, server: Web) -> None:
        self.server = server
        self.coordinator = Coordinator(server.url, "a" * 64, NodeKey(b"1" * 32))
        self.retry_after: str | None = "7"
        self.error: dict[str, str] | None = Overloaded("Too much to do.").to_wire()
        server.manner = self._answer

    def _answer(self, request: Handler) -> None:
        if self.retry_after is None:
            reply = LeaseReply(leases=(), newest_version=1, reason="", retry_s=0.0)
            news = HeartbeatReply(newest_version=1, heartbeat_s=1.0, finished=False)
            return request.answer(200, (reply if request.path == LEASES else news).to_bytes())
        body = b"<html>busy</html>" if self.error is None else canonical.encode(self.error)
        return request.answer(503, body, Retry_After=self.retry_after)

    async def lease(self) -> None:
        await self.coordinator.lease(LeaseRequest(version=1, groups=1))

    async def news(self) -> None:
        await self.coordinator.newer_version(VersionRequest(newer_than=0))

    def asked(self) -> int:
        return self.server.asked.total()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with web(lambda _request: None) as server:
        yield Scene(server)


@pytest.mark.trio
async def test_after_a_refusal_no_task_of_the_node_asks_before_retry_after_is_over(
    scene: Scene, mock_clock: MockClock
) -> None:
    with pytest.raises(Overloaded):
        await scene.lease()
    scene.retry_after = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.lease)
        nursery.start_soon(scene.news)
        await wait_all_tasks_blocked()
        mock_clock.jump(6.9)
        await wait_all_tasks_blocked(0.01)
        assert scene.asked() == 1
        mock_clock.jump(0.2)
    assert scene.asked() == 3
    await scene.lease()


@pytest.mark.trio
async def test_a_proxy_that_refuses_without_a_reason_is_heard_as_well(scene: Scene, mock_clock: MockClock) -> None:
    scene.error = None
    with pytest.raises(
        Unreachable, match=r"The coordinator does not answer its proxy, which returned HTTP status 503\.$"
    ):
        await scene.lease()
    scene.retry_after = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.lease)
        mock_clock.jump(6.9)
        await wait_all_tasks_blocked(0.01)
        assert scene.asked() == 1
        mock_clock.jump(0.2)
    assert scene.asked() == 2


@pytest.mark.trio
@pytest.mark.parametrize("nonsense", ["", "soon", "-5", "1e9", "inf", "Wed, 21 Oct 2026 07:28:00 GMT", "²"])
async def test_a_retry_after_that_is_no_number_of_seconds_keeps_nobody(scene: Scene, nonsense: str) -> None:
    scene.retry_after = nonsense.encode().decode("latin-1")
    for _ in range(2):
        with pytest.raises(Overloaded):
            await scene.lease()


@pytest.mark.trio
async def test_nobody_can_silence_a_node_for_a_day(scene: Scene, mock_clock: MockClock) -> None:
    scene.retry_after = str(86_400)
    with suppress(Overloaded):
        await scene.lease()
    scene.retry_after = None
    mock_clock.jump(RETRY_AFTER_MAX_S + 1)
    await scene.lease()
    assert scene.asked() == 2


def test_a_servers_date_says_how_far_its_clock_is_ahead() -> None:
    date = "Sun, 22 Nov 2026 08:00:10 GMT"
    here_s = datetime(2026, 11, 22, 8, 0, 0, tzinfo=UTC).timestamp()
    assert offset_s(date, here_s) == 10.5
    assert offset_s(date, here_s + 70) == -59.5


@pytest.mark.parametrize(
    "junk",
    [
        "", "yesterday", "Sun, 99 Nov 2026 08:00:10 GMT", "Sun, 22 Nov 99999999999999999999 08:00:10 GMT",
        "Sun, 22 Nov 2026 99999999999999:00:10 GMT", f"Sun, 22 Nov 2026 08:00:10 +{'9' * 20}",
    ],
)  # fmt: skip  # one word after the other
def test_a_date_that_is_none_says_nothing_and_ends_nobody(junk: str) -> None:
    assert offset_s(junk, 0.0) is None


@pytest.mark.trio
async def test_figures_nested_without_end_are_no_figures(scene: Scene) -> None:
    scene.server.manner = lambda request: request.answer(200, b"[" * 200_000)
    with pytest.raises(Unreachable, match="did not return JSON"):
        await scene.coordinator.status()
    await scene.coordinator.close()


@pytest.mark.trio
@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [
        (301, WrongAddress, "and leads to https://example.org/."),
        (404, WrongAddress, "/v1/status returned HTTP status 404 without a reason."),
        (501, WrongAddress, "HTTP status 501"),
        (429, Unreachable, "HTTP status 429"),
        (500, Unreachable, "HTTP status 500"),
        (502, Unreachable, "does not answer its proxy"),
    ],
)
async def test_another_web_server_is_told_from_a_coordinator_that_is_away(
    scene: Scene, status: int, kind: type[Unreachable], says: str
) -> None:
    where = {"Location": "https://example.org/"} if status == 301 else {}
    scene.server.manner = lambda request: request.answer(status, b"<html>", **where)
    with pytest.raises(Unreachable) as failed:
        await scene.coordinator.status()
    assert type(failed.value) is kind
    assert says in failed.value.message
    await scene.coordinator.close()


@pytest.mark.trio
async def test_a_port_where_nobody_listens_refuses_the_connection(scene: Scene) -> None:
    scene.server.close()
    with pytest.raises(Unreachable) as failed:
        await scene.news()
    assert type(failed.value) is Unreachable
    assert failed.value.message.endswith("does not respond: connection refused. No program listens at this port.")


@pytest.mark.trio
async def test_a_server_of_another_protocol_is_no_coordinator() -> None:
    """Such as the seeder, whose port is the next one."""

    async def greet(stream: trio.SocketStream) -> None:
        await stream.send_all(b"\x13/multistream/1.0.0\n\r\n\r\n")
        await stream.receive_some()

    async with trio.open_nursery() as nursery:
        listeners: list[trio.SocketListener] = await nursery.start(partial(trio.serve_tcp, greet, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        coordinator = Coordinator(f"http://127.0.0.1:{port}", "a" * 64, NodeKey(b"1" * 32))
        with pytest.raises(WrongAddress, match="does not speak HTTP"):
            await coordinator.status()
        await coordinator.close()
        nursery.cancel_scope.cancel()


@pytest.mark.trio
@pytest.mark.parametrize("count", [0, 1, 3])
async def test_verdicts_on_other_rollouts_than_were_sent_are_refused_by_name(scene: Scene, count: int) -> None:
    reply = SubmissionReply(verdicts=(Verdict(lease_id="0" * 32, outcome="accepted"),) * count)
    scene.server.manner = lambda request: request.answer(200, reply.to_bytes())
    with pytest.raises(MalformedMessage, match=f"{count} verdicts for 2 rollouts"):
        await scene.coordinator.submit(Submission(rollouts=(b"one", b"two")))
    await scene.coordinator.close()


@pytest.mark.trio
async def test_an_answer_that_drips_for_ever_is_given_up_and_named(scene: Scene, mock_clock: MockClock) -> None:
    """No byte is late, so that no wait for one ends: only the whole has a deadline."""
    wanted, sent = Queue[bytes](), Queue[bytes]()

    def drip(request: Handler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000000")
        request.end_headers()
        while byte := wanted.get():
            request.wfile.write(byte)
            sent.put(byte)
        request.close_connection = True

    scene.server.manner = drip
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_given_up, scene)
        while nursery.child_tasks:
            wanted.put(b"x")
            await trio.to_thread.run_sync(sent.get)
            await wait_all_tasks_blocked(0.01)
            mock_clock.jump(0.9 * (TIMEOUT.read or 0.0))
    wanted.put(b"")
    await scene.coordinator.close()


async def _given_up(scene: Scene) -> None:
    with pytest.raises(Unreachable, match="did not respond"):
        await scene.lease()


@pytest.mark.trio
async def test_an_address_that_idna_cannot_decode_is_one_round_s_trouble_and_no_end_of_a_list_of_rounds() -> None:
    coordinator = Coordinator("http://xn--a.example", "a" * 64, NodeKey(b"1" * 32), PublicOnly())
    with pytest.raises(Unreachable):
        await coordinator.status()
    async with open_origins(coordinator) as origins:
        assert not await origins.at_home()
    await coordinator.close()
