"""Reports of a node on long groups: in order, once each, and nothing of short ones."""

from collections.abc import Collection
from typing import Any, cast

import pytest
import trio
import trio.testing

from protocol import limits
from protocol.errors import Unreachable
from protocol.policy.chunks import digest
from protocol.wire.signing import NodeKey, open_envelope
from protocol.work.fragment import Fragment, FragmentPart
from protocol.work.lease import Lease
from protocol.work.messages import LeaseProgress, LeaseProgressReply
from protocol.work.rollout import pack_logprobs, pack_tokens
from swarm_node.work.progress_reporter import REPORT_EVERY_S, ProgressReporter, ReportedLease

pytestmark = pytest.mark.trio

LEASE = Lease(
    lease_id="1" * 32,
    version=1,
    seed=7,
    samples=2,
    prompt=pack_tokens([1]),
    price_micros_per_mtok=1,
    expires_ms=1,
)


class World:
    """A coordinator that records what is reported, and the reporter."""

    def __init__(self, lease: Lease = LEASE) -> None:
        self.told: list[LeaseProgress] = []
        self.takes, self.away = True, False
        self.gone: tuple[str, ...] = ()
        self.reporter = ProgressReporter(cast(Any, self), NodeKey(bytes(32)), "0" * 64)
        self.reporter.start(lease)

    async def progress(self, message: LeaseProgress) -> LeaseProgressReply:
        self.told.append(message)
        if self.away:
            raise Unreachable("away")
        taken = (LEASE.lease_id,) if message.fragments and self.takes else ()
        return LeaseProgressReply(gone=self.gone, taken=taken)

    def grow(self, sample: int, start: int, *tokens: int) -> None:
        packed, logprobs = pack_tokens(list(tokens)), pack_logprobs([-1.0] * len(tokens))
        self.reporter.add_tokens(
            LEASE.lease_id, [FragmentPart(sample=sample, start=start, tokens=packed, logprobs=logprobs, finish="")]
        )

    def payloads(self) -> list[bytes]:
        return [open_envelope("fragment", one).payload for message in self.told for one in message.fragments]


async def test_of_a_group_that_ends_soon_nothing_is_told(mock_clock: Any) -> None:
    world = World()
    world.grow(0, 0, 1)
    mock_clock.jump(REPORT_EVERY_S - 0.1)
    assert await world.reporter.report() == []
    world.reporter.forget(LEASE.lease_id)
    mock_clock.jump(REPORT_EVERY_S)
    assert await world.reporter.report() == []
    assert world.told == []


async def test_each_fragment_has_what_is_new_and_names_the_one_before(mock_clock: Any) -> None:
    world = World()
    mock_clock.jump(REPORT_EVERY_S)
    world.grow(0, 0, 1)
    world.grow(1, 0, 2)
    world.grow(0, 1, 3, 4)
    await world.reporter.report()
    await world.reporter.report()
    mock_clock.jump(REPORT_EVERY_S)
    world.grow(0, 3, 5)
    await world.reporter.report()
    mock_clock.jump(REPORT_EVERY_S)
    await world.reporter.report()
    first, second = (Fragment.from_bytes(payload) for payload in world.payloads())
    assert [(part.sample, part.start, len(part.tokens) // 4) for part in first.parts] == [(0, 0, 3), (1, 0, 1)]
    assert (first.previous, second.previous) == ("", digest(world.payloads()[0]))
    assert [part.start for part in second.parts] == [3]
    assert [message.held for message in world.told] == [(LEASE.lease_id,)] * 3


async def test_what_was_not_heard_is_said_again_with_the_same_bytes(mock_clock: Any) -> None:
    world = World()
    mock_clock.jump(REPORT_EVERY_S)
    world.grow(0, 0, 1)
    world.away = True
    with pytest.raises(Unreachable):
        await world.reporter.report()
    world.grow(0, 1, 2)
    world.away = False
    for _ in range(2):
        mock_clock.jump(REPORT_EVERY_S)
        await world.reporter.report()
    payloads = world.payloads()
    assert payloads[0] == payloads[1]
    assert Fragment.from_bytes(payloads[2]).previous == digest(payloads[1])


async def test_after_a_fragment_that_was_not_kept_no_more_are_told(mock_clock: Any) -> None:
    world = World()
    mock_clock.jump(REPORT_EVERY_S)
    world.takes = False
    world.grow(0, 0, 1)
    await world.reporter.report()
    world.grow(0, 1, 2)
    mock_clock.jump(REPORT_EVERY_S)
    await world.reporter.report()
    assert len(world.payloads()) == 1


async def test_a_lease_that_has_ended_elsewhere_is_named_once_it_is_known(mock_clock: Any) -> None:
    world = World()
    mock_clock.jump(REPORT_EVERY_S)
    world.gone = (LEASE.lease_id, "2" * 32)
    assert await world.reporter.report() == [LEASE.lease_id]


READ = LEASE.model_copy(update={"report_every_ms": 250})


async def test_of_a_lease_that_is_read_the_first_tokens_are_reported_at_once_and_later_ones_at_its_interval(
    mock_clock: Any,
) -> None:
    world = World(READ)
    await world.reporter.report()
    assert world.told == [], "there are no tokens yet"
    mock_clock.jump(0.1)
    world.grow(0, 0, 1)
    await world.reporter.report()
    assert [(message.held, len(message.fragments)) for message in world.told] == [((READ.lease_id,), 1)]
    world.grow(0, 1, 2)
    mock_clock.jump(0.2)
    await world.reporter.report()
    assert len(world.told) == 1, "its interval is not over"
    mock_clock.jump(0.1)
    await world.reporter.report()
    mock_clock.jump(0.3)
    await world.reporter.report()
    assert [len(Fragment.from_bytes(payload).parts) for payload in world.payloads()] == [1, 1], "nothing new came since"


async def test_the_reporter_wakes_when_a_lease_that_is_read_grows(autojump_clock: Any) -> None:
    world = World(READ)

    async def drop(gone: Collection[str]) -> None:
        raise AssertionError(gone)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.reporter.run, drop)
        await trio.sleep(0.1)
        began = trio.current_time()
        world.grow(0, 0, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert (len(world.told), trio.current_time()) == (1, began)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("every_ms", [limits.REPORT_EVERY_MIN_MS, READ.report_every_ms])
async def test_a_lease_that_is_read_has_few_enough_fragments_in_an_hour(every_ms: int) -> None:
    state = ReportedLease.started(READ.model_copy(update={"report_every_ms": every_ms}), 0.0)
    reports = 0
    while state.due_at < 3600:
        state.schedule_next(state.due_at)
        reports += 1
    assert 100 < reports < limits.FRAGMENTS_MAX


async def test_a_coordinator_cannot_ask_for_reports_without_a_pause() -> None:
    assert READ.model_copy(update={"report_every_ms": 1}).report_every_s == limits.REPORT_EVERY_MIN_MS / 1000


async def test_many_leases_are_reported_in_one_request(autojump_clock: Any) -> None:
    """Leases that began at different times are due together; one that is read does not wait for them."""
    await trio.sleep(REPORT_EVERY_S / 2)
    world, dropped = World(), list[str]()
    names = [f"{number:032x}" for number in range(8)]
    read = READ.model_copy(update={"lease_id": "f" * 32})

    async def drop(gone: Collection[str]) -> None:
        dropped.extend(gone)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.reporter.run, drop)
        for name in names:
            world.reporter.start(LEASE.model_copy(update={"lease_id": name}))
            await trio.sleep(0.3)
        world.reporter.start(read)
        began = trio.current_time()
        part = FragmentPart(sample=0, start=0, tokens=pack_tokens([1]), logprobs=pack_logprobs([-1.0]), finish="")
        world.reporter.add_tokens(read.lease_id, [part])
        await trio.sleep(0.3)
        assert [len(message.fragments) for message in world.told] == [1], f"at {trio.current_time() - began:.2f} s"
        await trio.sleep(2 * REPORT_EVERY_S)
        nursery.cancel_scope.cancel()
    every = len(names) + 1
    assert [len(message.held) for message in world.told] == [1, every, every], "one request in each interval"
