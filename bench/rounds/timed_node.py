"""`swarm-node join` with a clock beside its requests; everything else is the shipped node.

`python -P -m bench.rounds.timed_node FILE JOIN_STRING OPTIONS …`

- Each request for leases, each submission, each group that goes to the engine and each that ends is a line of JSON
  in FILE, which is written when its answer is there. Times are of the monotonic clock. A group begins with its first
  token.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import trio

from protocol.wire.signing import open_envelope
from protocol.work.messages import LeaseReply, LeaseRequest, Submission, SubmissionReply
from protocol.work.rollout import RolloutClaim
from swarm_node import cli
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.engine.client import EngineClient
from swarm_node.engine.messages import GroupDone, GroupFailed, GroupGrown, SampleRequest


def watch(file: TextIO) -> None:
    """Have the node's client and engine record what they do."""
    lease, submit = Coordinator.lease, Coordinator.submit
    sample, finished = EngineClient.submit, EngineClient.finished

    def record(kind: str, began: float, **facts: object) -> None:
        print(json.dumps({"kind": kind, "began": began, "ended": time.monotonic(), **facts}), file=file, flush=True)

    async def timed_lease(self: Coordinator, message: LeaseRequest) -> LeaseReply:
        began = time.monotonic()
        reply = await lease(self, message)
        ids = [each.lease_id for each in reply.leases]
        record("lease", began, leases=len(ids), ids=ids, url=self.url)
        return reply

    async def timed_submit(self: Coordinator, message: Submission) -> SubmissionReply:
        began = time.monotonic()
        reply = await submit(self, message)
        claims = [RolloutClaim.from_bytes(open_envelope("rollout", each).payload) for each in message.rollouts]
        record("submit", began, answered=[claim.lease_id for claim in claims], leases=len(reply.leases))
        return reply

    async def timed_sample(self: EngineClient, requests: Sequence[SampleRequest]) -> None:
        began = time.monotonic()
        await sample(self, requests)
        for request in requests:
            record("sample", began, lease=request.request_id, seed=request.seed, is_next=bool(request.prefixes))

    async def timed_finished(
        self: EngineClient, interrupted: trio.Event | None = None
    ) -> GroupGrown | GroupDone | GroupFailed | None:
        group = await finished(self, interrupted)
        if isinstance(group, GroupDone):
            record("group", time.monotonic() - group.first_token_ago_s, lease=group.request_id)
        return group

    Coordinator.lease = timed_lease  # type: ignore[method-assign]  # the shipped node has no hook for a clock
    Coordinator.submit = timed_submit  # type: ignore[method-assign]  # as above
    EngineClient.submit = timed_sample  # type: ignore[method-assign]  # as above
    EngineClient.finished = timed_finished  # type: ignore[method-assign]  # the same: a result has no hook either


def main() -> None:
    """Join, and record into the file that the first argument names."""
    _, file, *words = sys.argv
    with Path(file).open("w") as lines:
        watch(lines)
        sys.argv = ["swarm-node", "join", *words]
        cli.main()


if __name__ == "__main__":
    main()
