"""The graphics card, its driver, and its memory against the round's model."""

from swarm_node.doctor.report import CheckResult, fail, ok, skip, warn
from swarm_node.engine.precision import OVERHEAD_BYTES, ROOM
from swarm_node.machine.gpu import CUDA_MAJOR, Card, GpuProbe, driver_major, outdated

HOT_CELSIUS = 87.0
"""Temperature at which cards slow down."""

GB = 10**9


def card(seen: GpuProbe) -> CheckResult:
    """Check that there is a card, and that its driver answers."""
    if seen.trouble:
        step = "Reinstall the GPU driver or restart: the kernel module and nvidia-smi must have the same version."
        return fail("gpu", "A GPU driver is installed, but it does not respond.", seen.trouble, step)
    if not seen.cards:
        said = "No GPU detected; the CPU will be used (slow)."
        return warn("gpu", said, "neither nvidia-smi nor rocm-smi was found", "If you have a GPU, install its driver.")
    named = "; ".join(f"{gpu.name}, driver {gpu.driver or 'unknown'}" for gpu in seen.cards)
    hot = [gpu for gpu in seen.cards if gpu.celsius is not None and gpu.celsius >= HOT_CELSIUS]
    if hot:
        said = f"{hot[0].name} is at {hot[0].celsius:.0f} °C before any work; it will slow down."
        return warn("gpu", said, named, "Clean its fans, or set a power cap with `swarm-node limits --power-watts`.")
    return ok("gpu", "The GPU driver responds.", named)


def driver(seen: GpuProbe, cuda_major: int = CUDA_MAJOR) -> CheckResult:
    """Judge the NVIDIA driver by the CUDA for which the engines are built."""
    versions = [gpu.driver for gpu in seen.cards if gpu.vendor == "nvidia" and driver_major(gpu.driver)]
    if not versions:
        return skip("driver", "No NVIDIA driver reports its version.")
    reason = outdated(driver_major(versions[0]), cuda_major)
    if reason:
        said = "The NVIDIA driver is too old: torch would use the CPU, and vLLM would not start."
        step = "Update the driver and restart the machine (Ubuntu: `sudo ubuntu-drivers install`)."
        return warn("driver", said, reason, step)
    return ok("driver", f"The NVIDIA driver runs programs built for CUDA {cuda_major}.", versions[0])


def memory(seen: GpuProbe, weights_bytes: int | None, *, vram_share: float = 1.0) -> CheckResult:
    """Check that the round's model fits into the card's memory."""
    if weights_bytes is None:
        return skip(
            "vram",
            "Not checked: give a join string to check the memory for the round's model.",
            "swarm-node doctor JOIN_STRING",
        )
    known = [gpu for gpu in seen.cards if gpu.memory_bytes is not None]
    if not known:
        return skip("vram", "No GPU reports its memory; the model would use the system's RAM.")
    best = max(known, key=_free)
    total = best.memory_bytes or 0
    free = min(_free(best), int(total * vram_share))
    need = int(weights_bytes * ROOM) + OVERHEAD_BYTES
    evidence = f"{best.name}: {free / GB:.1f} of {total / GB:.1f} GB free, about {need / GB:.1f} GB needed"
    if weights_bytes > total:
        step = "Join a round with a smaller model, or use the CPU: `--device cpu`."
        return fail("vram", "The model is larger than the GPU's memory.", evidence, step)
    if need > free:
        step = "Close other programs that use the GPU, or raise `--vram-share`; otherwise fewer samples run at once."
        return warn("vram", "The model fits, but little memory is left, so few samples run at once.", evidence, step)
    return ok("vram", "The model fits into the GPU's memory.", evidence)


def free_bytes(seen: GpuProbe, *, vram_share: float = 1.0) -> int | None:
    """Return the memory that an engine may use on the card with the most free memory; None if unknown."""
    return max(
        (min(_free(gpu), int(gpu.memory_bytes * vram_share)) for gpu in seen.cards if gpu.memory_bytes is not None),
        default=None,
    )


def _free(card: Card) -> int:
    return (card.memory_bytes or 0) - (card.used_bytes or 0)
