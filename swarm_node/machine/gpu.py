"""Graphics cards, as reported by the vendor's program: name, driver, memory, temperature, power.

- `nvidia-smi` and `rocm-smi` come with the driver; Apple's memory is the machine's own.
- A program that is missing, hangs or prints something else means that the cards are unknown, not that there are none.
- A value that a card does not report (`[N/A]`) is None; the others are used.
"""

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

ASK_TIMEOUT_S = 10.0
"""A card that wakes up takes 2 s to answer; a hanging driver never does."""

FIELDS = ("name", "driver_version", "memory.total", "memory.used", "temperature.gpu", "power.draw", "power.limit")
MIB = 1024 * 1024

CUDA_MAJOR = 13
"""Major version of CUDA for which the torch and the vLLM of our lists are built."""

DRIVERS_MIN: Mapping[int, int] = MappingProxyType({12: 525, 13: 580})
"""Oldest NVIDIA driver that runs programs built for a major version of CUDA, as NVIDIA's table of minor version
compatibility has it."""

Vendor = Literal["nvidia", "amd", "apple"]


class Card(NamedTuple):
    """A graphics card."""

    vendor: Vendor
    name: str
    driver: str = ""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    celsius: float | None = None
    watts: float | None = None
    limit_watts: float | None = None


class GpuProbe(NamedTuple):
    """The detected cards, and the problem, if any."""

    cards: tuple[Card, ...] = ()
    trouble: str = ""
    """Reason why a card that seems to be installed does not answer."""


def find_cards(timeout_s: float = ASK_TIMEOUT_S) -> GpuProbe:
    """Return all cards that a driver reports; blocks for seconds."""
    if shutil.which("nvidia-smi"):
        return _nvidia(timeout_s)
    if shutil.which("rocm-smi"):
        return _amd(timeout_s)
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return GpuProbe((Card("apple", f"Apple {platform.machine()}", platform.mac_ver()[0], unified_memory()),))
    for sign, name in (("/proc/driver/nvidia/version", "nvidia-smi"), ("/dev/kfd", "rocm-smi")):
        if Path(sign).exists():
            return GpuProbe(trouble=f"{sign} says that a driver is loaded, but {name} is not on the PATH")
    return GpuProbe()


def parse_nvidia(text: str) -> tuple[Card, ...]:
    """Parse the output of `nvidia-smi --query-gpu`."""
    cards = []
    for line in filter(str.strip, text.splitlines()):
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(FIELDS):
            raise ValueError(f"{len(values)} values where {len(FIELDS)} were asked for")
        name, driver, *numbers = values
        total, used, celsius, watts, limit = map(_number, numbers)
        cards.append(Card("nvidia", name, driver, _bytes(total), _bytes(used), celsius, watts, limit))
    return tuple(cards)


def parse_amd(text: str) -> tuple[Card, ...]:
    """Parse the output of `rocm-smi --json`; its keys contain units, and differ between versions."""
    said: dict[str, dict[str, str]] = json.loads(text)
    driver = said.pop("system", {}).get("Driver version", "")
    cards = []
    for _, card in sorted(said.items()):
        total, used = _of(card, "vram total memory"), _of(card, "vram total used memory")
        name = next((value for key, value in card.items() if "card series" in key.lower()), "AMD GPU")
        cards.append(
            Card(
                "amd",
                name,
                driver,
                int(total) if total else None,
                int(used) if used else None,
                _of(card, "temperature (sensor edge)"),
                _of(card, "graphics package power"),
            )
        )
    return tuple(cards)


def driver_major(text: str) -> int:
    """Return the major version in a driver's version text; 0 if there is none."""
    match = re.search(r"\b(\d{3,4})\.\d+(?:\.\d+)?\b", text)
    return int(match[1]) if match else 0


def outdated(driver: int, cuda_major: int = CUDA_MAJOR) -> str:
    """Return why this NVIDIA driver cannot run programs built for this CUDA; empty if it can, or is unknown."""
    least = DRIVERS_MIN.get(cuda_major, 0)
    if not 0 < driver < least:
        return ""
    return f"CUDA {cuda_major} needs NVIDIA driver {least} or newer, and this machine has {driver}"


def unified_memory() -> int | None:
    """Return the memory that Apple's CPU and GPU share, in bytes."""
    done = _run(["sysctl", "-n", "hw.memsize"])
    return int(done) if isinstance(done, str) and done.strip().isdigit() else None


def _nvidia(timeout_s: float) -> GpuProbe:
    said = _run(["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"], timeout_s)
    return _parsed("nvidia-smi", said, parse_nvidia)


def _amd(timeout_s: float) -> GpuProbe:
    wanted = ("--showproductname", "--showdriverversion", "--showmeminfo", "vram", "--showtemp", "--showpower")
    return _parsed("rocm-smi", _run(["rocm-smi", *wanted, "--json"], timeout_s), parse_amd)


def _parsed(program: str, said: str | OSError | None, parse: Any) -> GpuProbe:
    if not isinstance(said, str):
        return GpuProbe(trouble=f"{program} does not answer{f' ({said})' if said else ''}")
    try:
        cards: tuple[Card, ...] = parse(said)
    except (ValueError, AttributeError) as error:
        first = (said.strip().splitlines() or ["nothing"])[0][:200]
        return GpuProbe(trouble=f"{program} says {first!r} ({error})")
    return GpuProbe(cards, "" if cards else f"{program} names no card")


def _run(command: Sequence[str], timeout_s: float = ASK_TIMEOUT_S) -> str | OSError | None:
    """Return the output of a program, including stderr if it fails; None if it hangs."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        return error
    except subprocess.TimeoutExpired:
        return None
    said = done.stdout.decode(errors="replace")
    return said if done.returncode == 0 else said + done.stderr.decode(errors="replace")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _bytes(mib: float | None) -> int | None:
    return None if mib is None else int(mib * MIB)


def _of(card: dict[str, str], what: str) -> float | None:
    return next((_number(value) for key, value in card.items() if what in key.lower()), None)
