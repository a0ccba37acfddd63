"""Graphics cards by name, and how much of their memory a learner can use."""

import re
from dataclasses import dataclass

from protocol import limits
from protocol.errors import ConfigInvalid

GIB = 1024 * limits.MIB

CARDS_GIB = {
    "h200": 140.4,
    "h100": 79.6,
    "h100-94": 93.6,
    "h20": 95.6,
    "b200": 178.4,
    "a100": 79.3,
    "a100-80": 79.3,
    "a100-40": 39.6,
    "a6000": 47.4,
    "a40": 44.7,
    "a10": 22.5,
    "l40s": 44.7,
    "l40": 44.7,
    "l4": 22.5,
    "t4": 14.9,
    "v100": 31.7,
    "5090": 31.8,
    "5080": 15.9,
    "4090": 24.0,
    "4080": 16.0,
    "3090": 24.0,
    "rtx6000ada": 47.4,
    "rtxpro6000": 95.6,
    "mi250": 64.0,
    "mi300x": 192.0,
    "mi325x": 256.0,
}
"""GiB that the driver reports: a little less than what is printed on the box, since error correction takes some."""

RESERVED_BYTES = GIB
"""Memory of the driver's context, the workspaces of matrix products and NCCL's buffers on each card."""

FRAGMENTED = 0.05
"""Share of the rest that lies in gaps between tensors: the allocator's blocks are larger than what they hold."""

CARDS_MAX = 64
"""Most cards: as many as `learner.processes` may be."""


@dataclass(frozen=True)
class Cards:
    """Equal cards of one machine."""

    name: str
    size_bytes: int
    count: int

    @property
    def usable_bytes(self) -> int:
        """Bytes of each that tensors can have."""
        return int((self.size_bytes - RESERVED_BYTES) * (1 - FRAGMENTED))


def parse(written: str) -> Cards:
    """Read `h100`, `h100:2` or `24GiB:2`: a name or a size, and how many there are."""
    name, _, count = written.lower().partition(":")
    size = re.fullmatch(r"(\d+(?:\.\d+)?)(gib|gb|g)", name)
    gib = float(size[1]) * (1 if size[2] == "gib" else 1e9 / GIB) if size else CARDS_GIB.get(name)
    if not gib or not re.fullmatch(r"[1-9]\d?", count or "1") or int(count or 1) > CARDS_MAX:
        raise ConfigInvalid(
            f"--gpu {written} names no card that is known.",
            hint=f"Write NAME:COUNT or SIZE:COUNT, as in h100:1 or 24GiB:2. Names: {', '.join(sorted(CARDS_GIB))}.",
        )
    return Cards(name, int(gib * GIB), int(count or 1))
