"""Hearing of new versions: what is only said moves nothing for long."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from protocol import limits
from protocol.messages import HeartbeatReply, VersionRequest
from swarm_node.pulse import Pulse


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
