"""An auditor whose replay is slow, or stands still: started by `test_auditor` as a process that may be ended."""

import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from coordinator.audit.auditor import Auditor
from coordinator.audit.case import RoundArchive
from coordinator.audit.scorer import VersionScorer
from coordinator.config import load

SLOW_MODULES = 10


def main(pace: str, url: str, folder: str, file: str, *settings: str) -> None:
    """Judge what the coordinator at this address has, at this pace."""
    config = load(Path(file), list(settings))
    held = threading.Semaphore(0)
    left = [SLOW_MODULES]

    def stand_still() -> None:
        threading.Event().wait()

    def paced_load(policy: Path, moved: Callable[[], None]) -> VersionScorer:
        def slow_module() -> None:
            if left[0]:
                left[0] -= 1
                held.acquire()
            moved()

        def module() -> None:
            after_each[0]()

        after_each = [moved]
        scorer = VersionScorer(policy, threads=1, moved=module)
        after_each[0] = {"slow": slow_module, "stands": stand_still}[pace]
        return scorer

    with (
        closing(RoundArchive(config)) as archive,
        closing(Auditor(config, archive, Path(folder), "paced", url, "token", paced_load)) as auditor,
    ):
        auditor._http.event_hooks["response"].append(
            lambda response: held.release() if response.url.path.endswith("/hold") else None
        )
        auditor.run()


main(*sys.argv[1:])
