"""The graphics card, its driver, and its memory against the round's model.

Checks of memory and disk: space for the round's versions, and the speed of the disk.
"""

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from protocol.limits import GB
from protocol.text.plain import size_text
from swarm_node.base.disk import existing
from swarm_node.doctor.report import CheckResult, fail, ok, skip, warn
from swarm_node.engine.cards import free_on_joined
from swarm_node.engine.choose import ENGINES
from swarm_node.engine.precision import part_bytes
from swarm_node.machine.gpu import CUDA_MAJOR, Card, GpuProbe, driver_major, newest_cuda, outdated

HOT_CELSIUS = 87.0
"""Temperature at which cards slow down."""


def card(seen: GpuProbe) -> CheckResult:
    """Check that there is a card, and that its driver answers."""
    if seen.trouble:
        step = "Reinstall the GPU driver or restart: the kernel module and nvidia-smi must have the same version."
        return fail("gpu", "A GPU driver is installed, but it does not respond.", seen.trouble, step)
    if not seen.cards:
        said = "No GPU detected; the CPU will be used (slow)."
        evidence = "neither nvidia-smi nor rocm-smi was found, and the kernel drives no card of AMD or Intel"
        return warn("gpu", said, evidence, "If you have a GPU, install its driver.")
    named = "; ".join(f"{gpu.name}, driver {gpu.driver or 'unknown'}" for gpu in seen.cards)
    hot = [gpu for gpu in seen.cards if gpu.celsius is not None and gpu.celsius >= HOT_CELSIUS]
    if hot:
        said = f"{hot[0].name} is at {hot[0].celsius:.0f} °C before any work; it will slow down."
        return warn("gpu", said, named, "Clean its fans, or set a power cap with `swarm-node limits --power-watts`.")
    return ok("gpu", "The GPU driver responds.", named)


def access(seen: GpuProbe, dev: Path = Path("/dev")) -> CheckResult:
    """Check that this user may open the files through which programs compute on a card of AMD or Intel."""
    vendors = {gpu.vendor for gpu in seen.cards}
    files = [dev / "kfd"] if "amd" in vendors else []
    files += sorted((dev / "dri").glob("renderD*")) if vendors & {"amd", "intel"} else []
    if not files:
        return skip("gpu access", "No card of AMD or Intel.")
    if missing := [file for file in files if not file.exists()]:
        step = "Install the kernel driver that the vendor describes (AMD: amdgpu with ROCm support), and restart."
        return warn("gpu access", "The card's driver does not offer to compute.", f"{missing[0]} is missing", step)
    if closed := [file for file in files if not os.access(file, os.R_OK | os.W_OK)]:
        step = "Run `sudo usermod -aG render,video $USER`, then log out and in."
        return warn("gpu access", "You may not use the graphics card.", f"no permission for {closed[0]}", step)
    return ok("gpu access", "You may use the graphics card.", ", ".join(map(str, files)))


def wsl() -> CheckResult:
    """Report what differs in WSL 2."""
    said = "This is WSL 2: Windows has the graphics driver, the battery and the user's input."
    step = "Use --hours, not --idle-minutes. For incoming connections, forward the port in Windows (docs/join.md)."
    return ok("wsl", said, step)


def driver(seen: GpuProbe, cuda_major: int = CUDA_MAJOR) -> CheckResult:
    """Judge the NVIDIA driver by the CUDA for which the engines are built."""
    versions = [gpu.driver for gpu in seen.cards if gpu.vendor == "nvidia" and driver_major(gpu.driver)]
    if not versions:
        return skip("driver", "No NVIDIA driver reports its version.")
    reason = outdated(driver_major(versions[0]), cuda_major)
    if reason:
        said = "The NVIDIA driver is too old: torch would use the CPU, and vLLM would not start."
        step = "Update the driver and restart the machine (Ubuntu: `sudo ubuntu-drivers install`; WSL: in Windows)."
        older = newest_cuda(driver_major(versions[0]))
        step += f" Or install a build of torch for CUDA {older}, which this driver runs." if older else ""
        return warn("driver", said, reason, step)
    return ok("driver", f"The NVIDIA driver runs programs built for CUDA {cuda_major}.", versions[0])


def memory(
    seen: GpuProbe,
    weights_bytes: int | None,
    *,
    vram_share: float = 1.0,
    splits: Sequence[int] = (),
    joins_cards: bool = False,
) -> CheckResult:
    """Check that the round's model fits into the memory of a card, or of cards that vLLM joins.

    `splits` are the numbers of cards over which vLLM can split it; `joins_cards` says that this node samples with vLLM.
    """
    if weights_bytes is None:
        return skip(
            "vram",
            "Not checked: the size of the round's model is unknown.",
            "Run `swarm-node doctor JOIN_STRING` when the round has published a version.",
        )
    known = [gpu for gpu in seen.cards if gpu.memory_bytes is not None]
    if not known:
        return skip("vram", "No GPU reports its memory; the model would use the system's RAM.")
    best = max(known, key=_free)
    total = best.memory_bytes or 0
    free = min(_free(best), int(total * vram_share))
    need = part_bytes(weights_bytes)
    evidence = f"{best.name}: {free / GB:.1f} of {total / GB:.1f} GB free, about {need / GB:.1f} GB needed"
    joined = _joined(seen, weights_bytes, vram_share, splits) if need > free else 0
    if joined and joins_cards:
        needs = f"the model needs about {need / GB:.1f} GB, one card has {free / GB:.1f} GB free"
        return ok("vram", f"{joined} cards per engine: {needs}.", evidence)
    small = [card for card in known if card is not best and min(_free(card), _share(card, vram_share)) < need]
    evidence += "".join(f"; card {card.number} ({card.name}) is too small and left out" for card in small)
    if weights_bytes > total:
        step = "Join a round with a smaller model, or use the CPU: `--device cpu`."
        if joined:
            step = f"vLLM can join {joined} of these cards: `--engine vllm` takes {ENGINES['vllm'].install}."
        return fail("vram", "The model is larger than the GPU's memory.", evidence, step)
    if need > free:
        step = "Close other programs that use the GPU, or raise `--vram-share`; otherwise fewer samples run at once."
        return warn("vram", "The model fits, but little memory is left, so few samples run at once.", evidence, step)
    return ok("vram", "The model fits into the GPU's memory.", evidence)


def _joined(seen: GpuProbe, weights_bytes: int, vram_share: float, splits: Sequence[int]) -> int:
    """Return the fewest cards that hold a model together; 0 if none do."""
    free = free_on_joined(seen, vram_share=vram_share)
    return next((cards for cards in splits if (free.get(cards) or 0) >= part_bytes(weights_bytes, cards)), 0)


def _share(card: Card, vram_share: float) -> int:
    return int((card.memory_bytes or 0) * vram_share)


def _free(card: Card) -> int:
    return (card.memory_bytes or 0) - (card.used_bytes or 0)


VERSIONS_KEPT = 3.5
"""Two versions, the one that is being built, and the chunks of a download."""

DISK_MIN_BYTES = 1024**3
SLOW_BYTES_PER_S = 40e6
"""The speed of a slow disk: below it, writing a version of 16 GB takes more than seven minutes."""

TRIED_BYTES = 64 * 1024 * 1024
PIECE_BYTES = 4 * 1024 * 1024
TRIED_S = 10.0
"""Limit of the test; a disk that takes longer is slow."""

RAM_FACTOR = 1.3
"""Factor of the weights: a CPU computes in float32, and a new version is loaded next to the old one's cache."""


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
    evidence = f"{size_text(free)} free, {size_text(need)} needed"
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
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        step = "Free some space." if full else "Fix what the check `home` names, or see the system's log."
        return fail("disk speed", f"Cannot write to the disk: {os.strerror(error.errno or 0)}.", "", step)
    rate = written / max(1e-6, time.perf_counter() - started)
    evidence = f"{rate / 1e6:.0f} MB/s, synced every {PIECE_BYTES // 2**20} MiB"
    if rate < SLOW_BYTES_PER_S:
        said = "The disk is slow: new versions will arrive late, and work on outdated versions is not credited."
        return warn("disk speed", said, evidence, "Put the node's folder on another disk with --home.")
    return ok("disk speed", "The disk is fast enough.", evidence)
