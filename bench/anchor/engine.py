"""The shipped engine child with a clock of its own: it samples as ever, and hands a group out when its time has come.

- Which tokens are drawn, and every word to the agent, are the real engine's: coordinator and learner see honest work.
- A group takes `--group-s` times a factor that its seed decides, a log-normal of mean 1, like the simulator's lengths.
- It sleeps in place of computing, so a machine that is busy with other things changes little.
"""

import argparse
import time
from collections.abc import Collection

from bench.anchor.setting import paced_s
from swarm_node.engine import child
from swarm_node.engine.engine import Answered
from swarm_node.engine.messages import GroupDone, SampleRequest, SamplingStats
from swarm_node.engine.torch.engine import TorchEngine

LOOK_S = 0.02
"""The time between two looks for commands while everything sleeps."""


class PacedEngine(TorchEngine):
    """Samples at once, and answers in its own time."""

    def __init__(self, group_s: float, at_once: int) -> None:
        super().__init__(device="cpu")
        self._group_s, self._at_once = group_s, at_once
        self._due: dict[str, tuple[float, float]] = {}
        """Request → when it began, and when it ends."""
        self._done: list[GroupDone] = []
        """Sampled, and not due yet."""
        self._paced_s = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._due)

    def add(self, request: SampleRequest) -> None:
        super().add(request)
        now_s = time.monotonic()
        took_s = paced_s(request.seed, self._group_s)
        self._due[request.request_id] = now_s, now_s + took_s
        self._paced_s += took_s / self._at_once

    def step(self) -> list[Answered]:
        said: list[Answered] = []
        for answer in super().step() if super().busy else ():
            if isinstance(answer, GroupDone):
                self._done.append(answer)
            else:
                said.append(answer)
        if not super().busy and not said:
            time.sleep(LOOK_S)  # the pace is played: the session asks again at once
        now_s = time.monotonic()
        for done in [done for done in self._done if self._due[done.request_id][1] <= now_s]:
            self._done.remove(done)
            began_s, _ = self._due.pop(done.request_id)
            said.append(done.model_copy(update={"first_token_ago_s": now_s - began_s}))
        return said

    def cancel(self, request_ids: Collection[str]) -> list[str]:
        super().cancel(request_ids)
        gone = [name for name in self._due if name in request_ids]
        for name in gone:
            del self._due[name]
        self._done = [done for done in self._done if done.request_id in self._due]
        return gone

    def measured(self) -> SamplingStats:
        """Return the paced speed, which the node reports."""
        paced_s, self._paced_s = self._paced_s, 0.0
        return super().measured().model_copy(update={"prefill_s": 0.0, "decode_s": paced_s})


def main() -> None:
    """Run as the engine child of a node."""
    parser = argparse.ArgumentParser(prog="bench.anchor.engine")
    parser.add_argument("--group-s", type=float, required=True)
    parser.add_argument("--at-once", type=int, required=True)
    own = parser.parse_args()
    child.ENGINES["paced"] = lambda _options: child.Made(PacedEngine(own.group_s, own.at_once), on_processor=True)
    child.main(["--engine", "paced"])


if __name__ == "__main__":
    main()
