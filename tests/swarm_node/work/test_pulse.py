"""Hearing of new versions, where what is only said moves nothing for long; and registering, until that is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from protocol import limits
from protocol.errors import (
    DiskFull,
    KeyInUse,
    KeyRevoked,
    NotInvited,
    Overloaded,
    PriceTooHigh,
    RequestExpired,
    SwarmError,
    Unreachable,
    WrongAddress,
)
from protocol.work.messages import Heartbeat, HeartbeatReply, Register, Transfer, VersionRequest
from swarm_node.base.trouble import Trouble
from swarm_node.coordinator_api.join_string import TRUST_FILE, parse, round_folder
from swarm_node.work.pulse import LEAVE_S, REGISTER_AGAIN_MAX_S, WAITING, Phase, Pulse

NOTHING_MOVED = Transfer(from_peers=0, from_seeder=0, from_http=0, to_peers=0)


class Coordinator:
    """Answers from a list, and then for ever with the last."""

    def __init__(self, *versions: int) -> None:
        self._versions = list(versions)
        self.asked: list[int] = []

    async def newer_version(self, request: VersionRequest) -> HeartbeatReply:
        await trio.sleep(1)
        self.asked.append(request.newer_than)
        version = self._versions.pop(0) if len(self._versions) > 1 else self._versions[0]
        return HeartbeatReply(newest_version=version, heartbeat_s=1.0, finished=False)


@pytest.mark.trio
async def test_a_forged_version_far_ahead_does_not_make_the_node_deaf(autojump_clock: MockClock) -> None:
    coordinator, hints = Coordinator(limits.VERSION_MAX, 7, 8), list[int]()
    member: Any = SimpleNamespace(coordinator=coordinator, policies=SimpleNamespace(hint=hints.append))
    with trio.move_on_after(5):
        await Pulse(cast(Any, member), cast(Any, None)).listen()
    assert coordinator.asked[:3] == [0, limits.VERSION_MAX, 7]
    assert hints[:3] == [limits.VERSION_MAX, 7, 8]


class Door:
    """A coordinator that refuses registrations with these, one after the other, and then lets the node in."""

    def __init__(self, *errors: SwarmError) -> None:
        self._errors = list(errors)
        self.member: Any = SimpleNamespace(
            coordinator=self,
            policies=SimpleNamespace(hint=lambda _version: None),
            settings=SimpleNamespace(name="a", price_micros_per_mtok=1, delegation=None),
            shares=False,
        )

    async def register(self, _message: Register) -> HeartbeatReply:
        if self._errors:
            raise self._errors.pop(0)
        return HeartbeatReply(newest_version=0, heartbeat_s=1.0, finished=False)


@pytest.mark.trio
async def test_a_node_waits_at_the_door_for_what_time_mends(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine whose clock is set three minutes after it has booted, and a coordinator whose disk is being cleared."""
    clock = RequestExpired("The request is 180 s away from the coordinator's clock.", hint="Set the clock.")
    door = Door(Unreachable("Nobody answers."), clock, clock, DiskFull("Full."), Overloaded("Full."), SwarmError("Oh."))
    pulse = Pulse(door.member, cast(Any, None))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pulse.register)
        await trio.sleep(1.5)
        assert (str(pulse.trouble.error), pulse.trouble.since_ms > 0) == (str(clock), True)
    assert pulse.trouble.error is None
    codes = [cast(tuple[str, ...], record.args)[1] for record in caplog.records if record.msg.startswith("%s code=")]
    assert codes == ["unreachable", "request_expired", "disk_full", "overloaded", "internal"]


@pytest.mark.trio
@pytest.mark.parametrize("refusal", [KeyRevoked("No."), PriceTooHigh("No."), NotInvited("No.")], ids=lambda e: e.code)
async def test_a_node_ends_at_a_refusal_that_no_waiting_mends(refusal: SwarmError) -> None:
    with pytest.raises(type(refusal)):
        await Pulse(Door(refusal).member, cast(Any, None)).register()


@pytest.mark.trio
@pytest.mark.parametrize("knows", [False, True])
async def test_an_address_without_a_coordinator_is_refused_unless_the_round_was_trusted_there(
    autojump_clock: MockClock, tmp_path: Path, knows: bool
) -> None:
    """A typing mistake would be waited for without end; a proxy that answers for its coordinator is waited for."""
    door = Door(WrongAddress("Another server answers."))
    door.member.settings.home, door.member.settings.join = tmp_path, parse(f"http://127.0.0.1:1#{'a' * 64}")
    if knows:
        trusted = round_folder(tmp_path, door.member.settings.join) / TRUST_FILE
        trusted.parent.mkdir(parents=True)
        trusted.touch()
        await Pulse(door.member, cast(Any, None)).register()
    else:
        with pytest.raises(WrongAddress):
            await Pulse(door.member, cast(Any, None)).register()


@pytest.mark.trio
async def test_a_node_that_waits_says_so_at_growing_intervals(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    pulse = Pulse(Door(*[Unreachable("Nobody answers.")] * 10_000).member, cast(Any, None))
    with trio.move_on_after(4000):
        await pulse.register()
    first, *others = [record.getMessage() for record in caplog.records]
    assert first == "waiting for the coordinator code=unreachable: Nobody answers. Next try in 1 s."
    assert others[0] == "still waiting for the coordinator after 61 s. Next try in 6 s."
    assert others[2] == "still waiting for the coordinator after 4 min. Next try in 26 s."
    assert len(others) == 7, "after 1, 2, 4, 8, 16, 32 and 64 minutes"
    assert f"Next try in {REGISTER_AGAIN_MAX_S:.0f} s." in others[-1]


@pytest.mark.trio
async def test_a_wait_that_follows_another_problem_is_not_said_to_be_as_old(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trouble = Trouble()
    trouble.record(KeyInUse("Another agent works."), "this key is in use")
    await trio.sleep(7200)
    for _ in range(5):
        trouble.record(Unreachable("Nobody answers."), WAITING, next_try_s=2.0)
        await trio.sleep(2)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


@pytest.mark.trio
async def test_a_wait_that_nobody_looked_at_for_hours_is_logged_once(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trouble = Trouble()
    for pause_s in (7200, 2, 2, 2):
        trouble.record(Unreachable("Nobody answers."), WAITING, next_try_s=2.0)
        await trio.sleep(pause_s)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


class Line:
    """A coordinator that a node loses sight of, at its own calls or where it waits for news."""

    def __init__(self, lost: str) -> None:
        self._lost = lost
        self.calls: list[str] = []
        self.registered: list[tuple[str, ...]] = []
        self.phases: list[str] = []
        self.hangs = False
        self.member: Any = SimpleNamespace(
            coordinator=self,
            addresses=("0.0.0.0:8701",),
            policies=SimpleNamespace(
                hint=lambda _version: None,
                fetcher=SimpleNamespace(
                    traffic=SimpleNamespace(blames=[], message=lambda _to_peers: NOTHING_MOVED),
                ),
                milestones=SimpleNamespace(unreported=lambda: (), acknowledge=lambda *_told, **_newest: None),
            ),
            server=SimpleNamespace(bytes_sent=0),
            settings=SimpleNamespace(name="a", price_micros_per_mtok=1, delegation=None),
            shares=True,
        )

    async def register(self, message: Register) -> HeartbeatReply:
        self.registered.append(message.addresses)
        return self._answer("register")

    async def heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        self.phases.append(message.phase)
        if self.hangs:
            await trio.sleep_forever()
        return self._answer("beat")

    async def newer_version(self, _request: VersionRequest) -> HeartbeatReply:
        await trio.sleep(20)
        return self._answer("listen")

    def _answer(self, call: str) -> HeartbeatReply:
        self.calls.append(call)
        if call == self._lost and self.calls.count(call) == 2:
            raise Unreachable("The line is down, and up again.")
        return HeartbeatReply(newest_version=0, heartbeat_s=10.0, finished=False)


@pytest.mark.trio
@pytest.mark.parametrize("lost", ["beat", "listen"])
async def test_a_node_that_lost_its_line_registers_again_since_it_may_have_another_address(
    autojump_clock: MockClock, lost: str
) -> None:
    """An address changes with a night's reconnection or another network: others dialled the old one until a restart."""
    line, activity = Line(lost), SimpleNamespace(version=0, phase=Phase.IDLE, tokens_per_s=0.0)
    pulse = Pulse(line.member, cast(Any, activity))
    await pulse.register()
    with trio.move_on_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pulse.run)
            nursery.start_soon(pulse.listen)
    assert line.calls.count("register") == 2
    again = len(line.calls) - line.calls[::-1].index("register") - 1
    assert line.calls[:again].count(lost) == 2, "not before, and not much later"


@pytest.mark.trio
async def test_a_node_registers_again_when_the_router_gives_it_another_address(autojump_clock: MockClock) -> None:
    line, activity = Line("nothing"), SimpleNamespace(version=0, phase=Phase.IDLE, tokens_per_s=0.0)
    pulse = Pulse(line.member, cast(Any, activity))
    await pulse.register()
    with trio.move_on_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pulse.run)
            await trio.sleep(100)
            assert line.calls.count("register") == 1
            line.member.addresses = ("[::]:8703", "45.77.1.1:8703")
            await trio.sleep(100)
            assert line.registered[-1] == line.member.addresses
            line.member.shares = False
            await trio.sleep(50)
    assert line.registered == [("0.0.0.0:8701",), ("[::]:8703", "45.77.1.1:8703"), ()]


@pytest.mark.trio
@pytest.mark.parametrize("hangs", [False, True])
async def test_an_agent_that_is_stopped_says_so_in_its_last_heartbeat(autojump_clock: MockClock, hangs: bool) -> None:
    """The node was shown as silent, as after a crash. A coordinator that hangs delays the end by two seconds."""
    line, activity = Line("nothing"), SimpleNamespace(version=0, phase=Phase.GENERATING, tokens_per_s=0.0)
    line.hangs = hangs
    pulse = Pulse(line.member, cast(Any, activity))
    began = trio.current_time()
    with trio.CancelScope() as scope:
        scope.cancel()
        await pulse.leave()
    assert line.phases == ["left"]
    assert trio.current_time() - began == (LEAVE_S if hangs else 0)


@pytest.mark.trio
async def test_an_agent_whose_key_another_agent_uses_shows_it_until_the_other_stops(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Divided(Line):
        is_divided = True

        async def heartbeat(self, message: Heartbeat) -> HeartbeatReply:
            if self.is_divided:
                raise KeyInUse("Another agent uses this node's key.")
            return await super().heartbeat(message)

    line, activity = Divided("nothing"), SimpleNamespace(version=0, phase=Phase.IDLE, tokens_per_s=0.0)
    pulse = Pulse(line.member, cast(Any, activity))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pulse.run)
        await trio.sleep(35)
        assert isinstance(pulse.trouble.error, KeyInUse)
        line.is_divided = False
        await trio.sleep(15)
        assert pulse.trouble.error is None
        nursery.cancel_scope.cancel()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
