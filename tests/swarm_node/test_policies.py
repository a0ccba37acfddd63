"""When a node looks for news of the policy by itself."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import SwarmError, Unreachable
from protocol.manifest import PolicyManifest
from protocol.messages import Peer, Plan, PlanRequest, Receipt
from protocol.signing import NodeKey
from swarm_node.arrivals import Arrivals
from swarm_node.policies import REFRESH_S, RETRY_S, PolicyFollower, refresh_in_s
from tests.swarm_node.p2p_world import Version, make_version, plan_of, store

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("lifetime_s", [4.0, 8.0, 30.0])
def test_short_proof_is_renewed_while_half_of_it_is_left(lifetime_s: float) -> None:
    """A coordinator renews its word four times in a lifetime, so each look finds one that ends later."""
    assert refresh_in_s(NOW + timedelta(seconds=lifetime_s), NOW) == lifetime_s / 2


def test_long_proof_is_looked_at_in_time_to_see_withheld_versions() -> None:
    assert refresh_in_s(NOW + timedelta(hours=1), NOW) == REFRESH_S
    assert refresh_in_s(None, NOW) == REFRESH_S


def test_proof_that_is_ending_is_not_asked_for_without_pause() -> None:
    assert refresh_in_s(NOW + timedelta(seconds=0.1), NOW) == RETRY_S
    assert refresh_in_s(NOW - timedelta(seconds=5), NOW) == RETRY_S


class Round:
    """Coordinator, origins, updater and host of a node at once; it records whom the node is told to call."""

    def __init__(self, version: Version, child: Peer) -> None:
        self._version, self._child = version, child
        self.called: list[list[Peer]] = []
        self.plans = 0
        self.trouble: SwarmError | None = None
        self.proved_until = None
        self.own_network = True
        self.dials = SimpleNamespace(begin=lambda peer: None, tell=lambda: ([], []))

    async def learn(self) -> None: ...
    async def fetched(self, receipt: Receipt) -> None: ...

    async def at_home(self) -> bool:
        return True

    def of(self, manifest: PolicyManifest) -> None:
        return None

    async def refresh(self) -> PolicyManifest:
        return self._version.manifest

    async def plan(self, request: PlanRequest) -> Plan:
        self.plans += 1
        if self.trouble:
            error, self.trouble = self.trouble, None
            raise error
        return plan_of().model_copy(update={"calls": (self._child,)})

    def connected(self) -> set[str]:
        return set()

    def call(self, peers: Iterable[Peer]) -> None:
        self.called.append(list(peers))

    def follower(self, folder: Path) -> PolicyFollower:
        """A node's follower as a start of the agent makes it."""
        everything: Any = self
        blobs = store(folder / "blobs", self._version.chunks)
        return PolicyFollower(
            coordinator=everything,
            origins=everything,
            updater=everything,
            blobs=blobs,
            arrivals=Arrivals(),
            folder=folder / "policies",
            host=everything,
            rng=Random(1),
        )


@pytest.mark.trio
async def test_a_shy_node_that_restarts_with_the_newest_version_calls_those_whom_it_feeds(tmp_path: Path) -> None:
    child = Peer(peer_id=NodeKey(b"c" * 32).node_id, address="127.0.0.1:1", kind="peer")
    here = Round(make_version(2), child)
    await here.follower(tmp_path)._follow()
    assert here.called == [[child]]
    follower = here.follower(tmp_path)  # the version is on the disk now
    here.trouble = Unreachable("the coordinator starts, too")
    await follower._follow()
    assert follower.ready is not None, "it works all the same"
    await follower._follow()
    assert here.called == [[child], [child]]
    await follower._follow()
    assert (len(here.called), here.plans) == (2, 3), "and asks no more once it knows"
