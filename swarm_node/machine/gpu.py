"""Graphics cards, as reported by the vendor's program: name, driver, memory, temperature, power.

- `nvidia-smi` and `rocm-smi` come with the driver; Apple's memory is the machine's own. Without such a program, the
  kernel's files describe the cards of AMD and Intel.
- In WSL 2 the driver is that of Windows, and its programs are in a folder of their own.
- A program that is missing, hangs or prints something else means that the cards are unknown, not that there are none.
- A card that is cut into slices (MIG) is its slices: programs see these only, one at a time.
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
from xml.etree import ElementTree

from protocol.limits import MIB

ASK_TIMEOUT_S = 10.0
"""A card that wakes up takes 2 s to answer; a hanging driver never does."""

FIELDS = ("name", "driver_version", "memory.total", "memory.used", "temperature.gpu", "power.draw", "power.limit")

CUDA_MAJOR = 13
"""Major version of CUDA for which the torch and the vLLM of our lists are built."""

DRIVERS_MIN: Mapping[int, int] = MappingProxyType({11: 450, 12: 525, 13: 580})
"""Oldest NVIDIA driver that runs programs built for a major version of CUDA, as NVIDIA's table of minor version
compatibility has it."""

Vendor = Literal["nvidia", "amd", "intel", "apple"]

DRM = Path("/sys/class/drm")
"""The kernel's graphics cards."""

PCI_VENDORS: Mapping[str, Vendor] = MappingProxyType({"0x1002": "amd", "0x8086": "intel"})

SLICED = r"\b(A30|A100|H100|H200|H20|H800|A800|GH200|B100|B200|B300|GB200|GB300|PRO [56]000)"
"""Names of cards that can be cut into slices (MIG)."""

SLICE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+(?P<index>\d+): \(UUID: (?P<uuid>MIG-[^)\s]+)\)", re.MULTILINE)
"""A line of `nvidia-smi -L` about a slice."""

SLICES_FROM = 100
"""The distance between the numbers of two cards' slices."""

WSL_PROGRAMS = Path("/usr/lib/wsl/lib")
"""Folder of the programs and libraries that Windows' driver brings into WSL 2."""


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
    number: int = 0
    """Number of the card, as the vendor's program counts; of a slice, see `with_slices`."""
    slice_uuid: str = ""
    """The name of a slice of a card (MIG); empty if it is a whole card."""


class GpuProbe(NamedTuple):
    """The detected cards, and the problem, if any."""

    cards: tuple[Card, ...] = ()
    trouble: str = ""
    """Reason why a card that seems to be installed does not answer."""


def find_cards(timeout_s: float = ASK_TIMEOUT_S) -> GpuProbe:
    """Return all cards that a driver reports; blocks for seconds."""
    if nvidia_smi := find_nvidia_smi():
        return _nvidia(nvidia_smi, timeout_s)
    if shutil.which("rocm-smi"):
        return _amd(timeout_s)
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return GpuProbe((Card("apple", f"Apple {platform.machine()}", platform.mac_ver()[0], unified_memory()),))
    if cards := kernel_cards():
        return GpuProbe(cards)
    for sign, name in (("/proc/driver/nvidia/version", "nvidia-smi"), ("/dev/kfd", "rocm-smi")):
        if Path(sign).exists():
            return GpuProbe(trouble=f"{sign} says that a driver is loaded, but {name} is not on the PATH")
    return GpuProbe()


def find_nvidia_smi() -> str | None:
    """Return the path of `nvidia-smi`, on the PATH or where WSL 2 has it."""
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=str(WSL_PROGRAMS))


def kernel_cards(drm: Path = DRM) -> tuple[Card, ...]:
    """Return the cards of AMD that the kernel drives, otherwise those of Intel, in the order of their place on the bus.

    A processor's own graphics unit has no sensors of its own on Intel, and is not returned.
    """
    found: list[tuple[str, Card]] = []
    for folder in sorted(drm.glob("card[0-9]*")):
        device = folder / "device"
        vendor = PCI_VENDORS.get(_line(device / "vendor"))
        sensors = next(iter(sorted((device / "hwmon").glob("hwmon*"))), None)
        if not folder.name.removeprefix("card").isdecimal() or vendor is None or (vendor == "intel" and not sensors):
            continue
        name = _line(device / "product_name") or f"{vendor.upper()} GPU {_line(device / 'device')}".strip()
        card = Card(
            vendor,
            name,
            memory_bytes=_whole(device / "mem_info_vram_total"),
            used_bytes=_whole(device / "mem_info_vram_used"),
            celsius=_scaled(sensors, ("temp1_input", "temp2_input"), 1000),
            watts=_scaled(sensors, ("power1_average", "power1_input"), 10**6),
        )
        found.append((device.resolve().name, card))
    cards = [card for _, card in sorted(found)]
    ours = [card for card in cards if card.vendor == "amd"] or cards  # an engine is built for one vendor
    return tuple(card._replace(number=number) for number, card in enumerate(ours))


def parse_nvidia(text: str) -> tuple[Card, ...]:
    """Parse the output of `nvidia-smi --query-gpu`, which has the cards in the order of their numbers."""
    cards: list[Card] = []
    for line in filter(str.strip, text.splitlines()):
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(FIELDS):
            raise ValueError(f"{len(values)} values where {len(FIELDS)} were asked for")
        name, driver, *numbers = values
        total, used, celsius, watts, limit = map(_number, numbers)
        cards.append(Card("nvidia", name, driver, _bytes(total), _bytes(used), celsius, watts, limit, len(cards)))
    return tuple(cards)


def parse_amd(text: str) -> tuple[Card, ...]:
    """Parse the output of `rocm-smi --json`; its keys contain units, and differ between versions."""
    said: dict[str, dict[str, str]] = json.loads(text)
    driver = said.pop("system", {}).get("Driver version", "")
    cards = []
    for place, (key, card) in enumerate(sorted(said.items(), key=lambda item: (len(item[0]), item[0]))):
        total, used = _number_of(card, "vram total memory"), _number_of(card, "vram total used memory")
        name = next((value for key, value in card.items() if "card series" in key.lower()), "AMD GPU")
        cards.append(
            Card(
                "amd",
                name,
                driver,
                int(total) if total else None,
                int(used) if used else None,
                _number_of(card, "temperature (sensor edge)"),
                _number_of(card, "graphics package power"),
                number=int(key.removeprefix("card")) if key.removeprefix("card").isdecimal() else place,
            )
        )
    return tuple(cards)


def only_cards(cards: Sequence[Card]) -> dict[str, str]:
    """Return the environment variables with which a program sees only these cards, which are of one vendor."""
    numbers, vendor = ",".join(str(card.number) for card in cards), cards[0].vendor
    if cards[0].slice_uuid:  # a program sees one slice at most
        numbers = cards[0].slice_uuid
    if vendor == "nvidia":  # CUDA counts the fastest card first, unless it is told otherwise
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": numbers}
    if vendor == "amd":
        return {"HIP_VISIBLE_DEVICES": numbers, "GGML_VK_VISIBLE_DEVICES": numbers}
    if vendor == "intel":
        return {"ZE_AFFINITY_MASK": numbers, "GGML_VK_VISIBLE_DEVICES": numbers}
    return {}


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


def newest_cuda(driver: int) -> int:
    """Return the newest major version of CUDA whose programs this NVIDIA driver runs; 0 if there is none."""
    return max((cuda for cuda, least in DRIVERS_MIN.items() if driver >= least), default=0)


def unified_memory() -> int | None:
    """Return the memory that Apple's CPU and GPU share, in bytes."""
    done = _run(["sysctl", "-n", "hw.memsize"])
    return int(done) if isinstance(done, str) and done.strip().isdigit() else None


def _nvidia(program: str, timeout_s: float) -> GpuProbe:
    said = _run([program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"], timeout_s)
    probe = _parsed("nvidia-smi", said, parse_nvidia)
    if not any(re.search(SLICED, card.name) for card in probe.cards):
        return probe
    listed = _run([program, "-L"], timeout_s)
    if not isinstance(listed, str) or not SLICE.search(listed):
        return probe
    read = _run([program, "-q", "-x"], timeout_s)
    return probe._replace(cards=with_slices(probe.cards, listed, read if isinstance(read, str) else ""))


def with_slices(cards: Sequence[Card], listed: str, read: str) -> tuple[Card, ...]:
    """Return the cards with those that are cut into slices (MIG) replaced by their slices.

    `listed` is the output of `nvidia-smi -L`, `read` that of `nvidia-smi -q -x`, which has the memory of each slice.
    A program sees one slice at most, and no longer the card. The slices of card 0 have the numbers 100, 101, …; those
    of card 1 begin at 200. The card's temperature and power are those of each slice.
    """
    memory = _slice_memory(read)
    slices: dict[int, list[Card]] = {}
    number = -1
    for line in listed.splitlines():
        if named := re.match(r"GPU (\d+):", line):
            number = int(named[1])
        elif (found := SLICE.match(line)) and (card := next((each for each in cards if each.number == number), None)):
            index = int(found["index"])
            total, used = memory.get((number, index), (None, None))
            named_so = f"{card.name} MIG {found['profile']}"
            place = SLICES_FROM * (number + 1) + index
            made = card._replace(name=named_so, memory_bytes=total, used_bytes=used, number=place)
            slices.setdefault(number, []).append(made._replace(slice_uuid=found["uuid"]))
    return tuple(each for card in cards for each in slices.get(card.number, [card]))


def _slice_memory(read: str) -> dict[tuple[int, int], tuple[int | None, int | None]]:
    """Return the total and used bytes of each slice, by the number of its card and its own."""
    try:
        log = ElementTree.fromstring(read)  # the driver's own program wrote it
    except ElementTree.ParseError:
        return {}
    found = {}
    for number, card in enumerate(log.iter("gpu")):
        for piece in card.iter("mig_device"):
            total, used = (piece.findtext(f"fb_memory_usage/{name}", "").split(" ")[0] for name in ("total", "used"))
            index = piece.findtext("index", "")
            if index.isdecimal():
                found[number, int(index)] = (_bytes(_number(total)), _bytes(_number(used)))
    return found


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


def _line(path: Path) -> str:
    """Return a file's text without its line end; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _whole(path: Path) -> int | None:
    text = _line(path)
    return int(text) if text.isdecimal() else None


def _scaled(folder: Path | None, names: Sequence[str], divisor: int) -> float | None:
    """Return the value of the first of these sensors that there is."""
    values = [_whole(folder / name) for name in names] if folder else []
    return next((value / divisor for value in values if value is not None), None)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _bytes(mib: float | None) -> int | None:
    return None if mib is None else int(mib * MIB)


def _number_of(card: dict[str, str], what: str) -> float | None:
    return next((_number(value) for key, value in card.items() if what in key.lower()), None)
