"""A program of several ranks: each loads a policy, and writes how much memory that took at most.

Its arguments are the number of ranks, a tiny policy folder, a large one, `trained` or `frozen`, and a folder for the
results. The tiny policy is loaded first, so that what is imported on the way is not counted.
"""

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from coordinator.learner.ranks import Ranks
from coordinator.model.loading import keep_as_published, load_model
from tests.coordinator.learner.forked_ranks import forked

SAMPLE_S = 0.002


def private_bytes() -> int:
    """Memory of this process that no file stands behind."""
    found = re.search(r"^RssAnon:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found.group(1)) * 1024


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most private memory above that of the beginning, in the only element of a list."""
    start, over, found = private_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            found[0] = max(found[0], private_bytes() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield found
    over.set()
    watcher.join()
    found[0] = max(found[0], private_bytes() - start)


def load(tiny: str, folder: str, purpose: str, results: str) -> None:
    """Load both policies as one of the ranks."""
    ranks = Ranks()

    def lay_out(model: Any) -> None:
        if purpose == "frozen":
            keep_as_published(model, torch.bfloat16)
        ranks.shard(model)

    load_model(Path(tiny), lay_out)
    ranks.meet()
    with peak() as most:
        model = load_model(Path(folder), lay_out)
    count = sum(weight.numel() for weight in model.parameters())
    (Path(results) / f"{ranks.rank}.json").write_text(json.dumps(most[0] / count))
    ranks.meet()
    ranks.leave()


def main(size: str, *words: str) -> None:
    torch.set_num_threads(1)
    assert forked(int(size), load, *words) == [0] * int(size)


if __name__ == "__main__":
    main(*sys.argv[1:])
