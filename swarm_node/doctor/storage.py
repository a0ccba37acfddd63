"""Checks of memory and disk: space for the round's versions, and the speed of the disk."""

import os
import shutil
import tempfile
import time
from pathlib import Path

from swarm_node.base.disk import existing
from swarm_node.doctor.report import CheckResult, fail, ok, skip, warn

VERSIONS_KEPT = 3.5
"""Two versions, the one that is being built, and the chunks of a download."""

DISK_MIN_BYTES = 1024**3
SLOW_BYTES_PER_S = 40e6
"""At a lower speed, writing a version of 16 GB takes more than seven minutes."""

TRIED_BYTES = 64 * 1024 * 1024
PIECE_BYTES = 4 * 1024 * 1024
TRIED_S = 10.0
"""Limit of the test; a disk that takes longer is slow."""

RAM_FACTOR = 1.3
"""Factor of the weights: a CPU computes in float32, and a new version is loaded next to the old one's cache."""

GB = 10**9


def ram(total: int | None, free: int | None, weights_bytes: int | None, *, on_card: bool) -> CheckResult:
    """Check that the model fits into the machine's memory."""
    if total is None:
        return skip("ram", "This system does not report its memory.")
    evidence = f"{total / GB:.1f} GB in total" + (f", {free / GB:.1f} GB free" if free is not None else "")
    need = 0 if weights_bytes is None or on_card else int(weights_bytes * RAM_FACTOR)
    evidence += f", about {need / GB:.1f} GB needed" if need else ""
    if need > total:
        step = "Join a round with a smaller model, or use a GPU."
        return fail("ram", "The model is larger than this machine's memory.", evidence, step)
    if free is not None and need > free:
        step = "Close other programs. A machine that swaps is too slow to be useful."
        return warn("ram", "The model fits only if other programs free memory.", evidence, step)
    return ok("ram", "There is enough memory.", evidence)


def space(folder: Path, version_bytes: int | None) -> CheckResult:
    """Check the disk space for the versions that a node keeps."""
    place = existing(folder)
    free = shutil.disk_usage(place).free
    need = max(DISK_MIN_BYTES, int(VERSIONS_KEPT * (version_bytes or 0)))
    evidence = f"{free / GB:.1f} GB free, {need / GB:.1f} GB needed"
    if free < need:
        step = "Free some space, or choose a folder on a larger disk with --home."
        return fail("disk", "There is not enough disk space for the round's versions.", evidence, step)
    return ok("disk", "There is enough disk space for the round's versions.", evidence)


def speed(folder: Path, *, tried_bytes: int = TRIED_BYTES) -> CheckResult:
    """Measure writing with sync, as in a download; the file is removed afterwards."""
    piece = os.urandom(PIECE_BYTES)
    started, written = time.perf_counter(), 0
    try:
        with tempfile.NamedTemporaryFile(dir=existing(folder), prefix=".doctor.") as file:
            while written < tried_bytes and time.perf_counter() - started < TRIED_S:
                file.write(piece)
                file.flush()
                os.fdatasync(file.fileno())
                written += len(piece)
    except OSError as error:
        return fail("disk speed", f"Cannot write to the disk: {os.strerror(error.errno or 0)}.", "", "Free some space.")
    rate = written / max(1e-6, time.perf_counter() - started)
    evidence = f"{rate / 1e6:.0f} MB/s, synced every {PIECE_BYTES // 2**20} MiB"
    if rate < SLOW_BYTES_PER_S:
        said = "The disk is slow: new versions will arrive late, and work on outdated versions is not credited."
        return warn("disk speed", said, evidence, "Put the node's folder on another disk with --home.")
    return ok("disk speed", "The disk is fast enough.", evidence)
