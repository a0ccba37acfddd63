"""Time for which a learner stands still for its versions, where the disk of its round writes 100 MB/s.

- The real programs: a coordinator with its learner and seeder, and a light node, whose groups cost nothing; so the
  learner never waits for a batch, and what it waits for is the disk. All weights of an untrained Qwen3 are trained.
- The disk is a file of this one behind a loop device, whose writes the kernel holds back (`blkio` of cgroups v1): for
  root, on Linux. Everything of the round lies on it: checkpoints, versions, uploads, chunks, store.
- `learner/outgoing_s` of each update says how long the loop stood still. The learner also logs how long each version
  took: from that follows the share if the loop waited for each version to its end. The store shares the disk, so
  requests for batches wait for it, too; that is printed, and not judged.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import Bench, quick_from_environment
from tests.processes.light_node import Labourer
from tests.processes.programs import Swarm, until
from tests.processes.rounds import Coordinator, Settings

DISK_MB_PER_S = 100
DISK_GIB = 8
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")

KAPPA, GROUPS, SAMPLES, TOKENS = 2, 4, 8, 48
SHAPE: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 12, "intermediate_size": 1536, "head_dim": 64}
"""42 million numbers: a checkpoint of 0.5 GB, and versions of 84 MB."""

UNCOUNTED = 4
"""Updates until the optimizer has its state and every version is a patch."""

PATIENCE_S = 3600.0


@contextmanager
def slow_disk() -> Iterator[Path]:
    """Mount a file system of its own whose writes are held back."""
    if not THROTTLE.exists():
        raise SystemExit("bench outgoing needs root on Linux with cgroups v1 (blkio).")
    with tempfile.TemporaryDirectory() as scratch:
        image, place = Path(scratch) / "disk", Path(scratch) / "mounted"
        place.mkdir()
        with image.open("wb") as file:
            file.truncate(DISK_GIB * 2**30)
        device = _said("losetup", "--find", "--show", str(image))
        numbers = Path("/sys/block", Path(device).name, "dev").read_text().strip()
        try:
            _said("mkfs.ext4", "-q", device)
            _said("mount", device, str(place))
            THROTTLE.write_text(f"{numbers} {DISK_MB_PER_S * 1_000_000}\n")
            yield place
        finally:
            THROTTLE.write_text(f"{numbers} 0\n")
            subprocess.run(["umount", "--lazy", place], check=False)
            _said("losetup", "--detach", device)


def _said(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def make_policy(folder: Path) -> None:
    """Write an untrained policy in bfloat16."""
    import torch
    from transformers import Qwen3Config

    from tests.tiny_policy import make_other_policy

    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "eos_token_id": 2}
    config = Qwen3Config(vocab_size=320, tie_word_embeddings=True, **SHAPE, **heads)
    make_other_policy(folder, config, dtype=torch.bfloat16)


def settings(policy: Path) -> Settings:
    """A round that does not end by itself."""
    return {
        "round": {"max_updates": 100_000},
        "model": {"path": str(policy)},
        "sampling": {"samples_per_group": SAMPLES, "max_new_tokens": TOKENS},
        "staleness": {"max_updates": 2 * KAPPA, "publish_every": KAPPA},
        "learner": {"groups_per_update": GROUPS, "threads": 1},
    }


def train(place: Path, updates: int) -> tuple[list[dict[str, float]], str]:
    """Have a round make so many updates; its metrics and its learner's log."""
    make_policy(place / "policy")
    swarm = Swarm(place / "swarm")
    try:
        coordinator = Coordinator(swarm, settings(place / "policy")).start(learner=True)
        metrics = coordinator.folder / "learner" / "metrics.jsonl"

        def rows() -> list[dict[str, float]]:
            lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
            return [json.loads(line) for line in lines if line.endswith("\n")]

        labourer = Labourer(coordinator.join_string, max_new_tokens=TOKENS)
        labourer.start()
        until("the updates", lambda: len(rows()) >= updates, within_s=PATIENCE_S)
        labourer.finish()
        return rows()[:updates], (coordinator.folder / "logs" / "learner.log").read_text()
    finally:
        swarm.close()


def main() -> int:
    """Run one round."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(
        prog="bench outgoing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=UNCOUNTED + (4 if quick else 16))
    options = parser.parse_args()
    with slow_disk() as place:
        rows, log = train(place, options.updates)
    inputs = {"disk_mb_per_s": DISK_MB_PER_S, "kappa": KAPPA, "groups": GROUPS, "samples": SAMPLES, "tokens": TOKENS}
    bench = Bench("outgoing", inputs={**inputs, "updates": options.updates}, quick=quick)
    ended = [row["seconds"] for row in rows]
    counted = rows[UNCOUNTED:]
    for before, row in zip(ended[UNCOUNTED - 1 :], counted, strict=False):
        bench.measure("an update, all told", row["seconds"] - before, unit="s")
        bench.measure("of it, standing still for a version", row["learner/outgoing_s"], unit="s")
    waits = re.findall(r" update=(\d+)/\d+ .*\bwait_s=(\S+)", log)
    for waited in [float(waited) for update, waited in waits if UNCOUNTED < int(update) <= options.updates]:
        bench.measure("beside it, waiting for a batch", waited, unit="s")
    out = [(int(update), float(taken)) for update, taken in re.findall(r"published .* update=(\d+) seconds=(\S+)", log)]
    took = [taken for update, taken in out if UNCOUNTED <= update < options.updates]
    for taken in took:
        bench.measure("a version, from its checkpoint to its publication", taken, unit="s")
    all_s = ended[-1] - ended[UNCOUNTED - 1]
    stood_s = sum(row["learner/outgoing_s"] for row in counted)
    versions_s = bench.median("a version, from its checkpoint to its publication") * len(counted) / KAPPA
    bench.measure("idle for versions, if the loop waited for each", versions_s / (all_s - stood_s + versions_s))
    bench.goal("the share of time for which the learner stands still", stood_s / all_s, at_most=0.10)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
