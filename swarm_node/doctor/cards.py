"""The graphics card, its driver, and its memory against the round's model."""

from swarm_node.doctor.report import CheckResult, fail, ok, skip, warn
from swarm_node.engine.precision import OVERHEAD_BYTES, ROOM
from swarm_node.machine.gpu import CUDA_MAJOR, Card, GpuProbe, driver_major, outdated

HOT_CELSIUS = 87.0
"""Cards slow down from here."""

GB = 10**9


def card(seen: GpuProbe) -> CheckResult:
    """Is there one, and does its driver answer?"""
    if seen.trouble:
        step = "Reinstall the GPU's driver, or restart: the kernel module and nvidia-smi must have the same version."
        return fail("gpu", "A GPU driver is installed, but it does not answer.", seen.trouble, step)
    if not seen.cards:
        said = "No GPU detected; this node would sample on the CPU, which is slow."
        return warn(
            "gpu", said, "neither nvidia-smi nor rocm-smi was found", "If this machine has a GPU, install its driver."
        )
    named = "; ".join(f"{one.name}, driver {one.driver or 'unknown'}" for one in seen.cards)
    hot = [one for one in seen.cards if one.celsius is not None and one.celsius >= HOT_CELSIUS]
    if hot:
        said = f"{hot[0].name} is at {hot[0].celsius:.0f} °C before any work; it will run slower."
        return warn("gpu", said, named, "Clean its fans, or limit its power with `swarm-node limits --power-watts`.")
    return ok("gpu", "The GPU driver answers.", named)


def driver(seen: GpuProbe, cuda_major: int = CUDA_MAJOR) -> CheckResult:
    """Judge the NVIDIA driver by the CUDA for which the engines are built."""
    versions = [one.driver for one in seen.cards if one.vendor == "nvidia" and driver_major(one.driver)]
    if not versions:
        return skip("driver", "No NVIDIA driver reports its version.")
    reason = outdated(driver_major(versions[0]), cuda_major)
    if reason:
        said = "The NVIDIA driver is too old: torch would sample on the processor, and vLLM would not start."
        step = "Update the driver and restart the machine (Ubuntu: `sudo ubuntu-drivers install`)."
        return warn("driver", said, reason, step)
    return ok("driver", f"The NVIDIA driver runs programs built for CUDA {cuda_major}.", versions[0])


def memory(seen: GpuProbe, weights_bytes: int | None, *, vram_share: float = 1.0) -> CheckResult:
    """Does the round's model fit?"""
    if weights_bytes is None:
        return skip("vram", "Without a round, there is no model to compare with.", "swarm-node doctor JOIN_STRING")
    known = [one for one in seen.cards if one.memory_bytes is not None]
    if not known:
        return skip("vram", "No card tells its memory; the model would lie in the machine's.")
    best = max(known, key=_free)
    total = best.memory_bytes or 0
    free = min(_free(best), int(total * vram_share))
    need = int(weights_bytes * ROOM) + OVERHEAD_BYTES
    evidence = f"{best.name}: {free / GB:.1f} of {total / GB:.1f} GB free, about {need / GB:.1f} GB wanted"
    if weights_bytes > total:
        step = "Join a round with a smaller model, or sample on the processor: `--device cpu`."
        return fail("vram", "The model is larger than the card's memory.", evidence, step)
    if need > free:
        step = "Close what else uses the card, or raise `--vram-share`; else fewer samples are drawn at once."
        return warn("vram", "The model fits, but little or nothing is left for many samples at once.", evidence, step)
    return ok("vram", "The model fits into the card's memory.", evidence)


def free_bytes(seen: GpuProbe, *, vram_share: float = 1.0) -> int | None:
    """Return what an engine may take of the card that has the most memory free; None where no card says."""
    return max(
        (min(_free(one), int(one.memory_bytes * vram_share)) for one in seen.cards if one.memory_bytes is not None),
        default=None,
    )


def _free(card: Card) -> int:
    return (card.memory_bytes or 0) - (card.used_bytes or 0)
