"""The interface of contenders: one is started once in a cell, broadcasts payload after payload, and is stopped.

- A broadcast is timed from the moment at which the new version is announced, to the moment at which each worker has
  the whole of it on its disk and has checked every byte; the slowest worker counts.
- Whether that is so is then looked up in the files, not asked of the contender.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Protocol

import numpy as np

from bench.broadcast.net import Net

SOURCE = "source"
PAYLOAD = "model.safetensors"


@dataclass(frozen=True)
class Outcome:
    """Seconds until each worker had everything, and what else there is to tell."""

    began_at_s: float
    """Unix time of the announcement."""
    seconds: Mapping[str, float]
    bad_bytes: int
    """Wrong bytes in the files that workers hold to be complete."""
    bytes_from: Mapping[str, int] = field(default_factory=dict)

    @property
    def completion_s(self) -> float:
        return max(self.seconds.values())

    @property
    def mean_s(self) -> float:
        return fmean(self.seconds.values())


class Contender(Protocol):
    """A program that brings a file to all workers."""

    name: str

    def start(self) -> None:
        """Have every process up."""

    def broadcast(self, payload: Path, *, within_s: float) -> Outcome:
        """Bring the payload's folder to every worker."""

    def close(self) -> None:
        """End every process."""


def workers_of(net: Net) -> list[str]:
    return [party for party in net.parties if party != SOURCE]


def make_payload(folder: Path, size_bytes: int) -> Path:
    """A safetensors file of random bf16 bits: valid, and neither compressible nor like the one before."""
    folder.mkdir(parents=True)
    width = 1024
    rows = max(1, (size_bytes - 256) // (2 * width))
    header = f'{{"weight":{{"dtype":"BF16","shape":[{rows},{width}],"data_offsets":[0,{2 * rows * width}]}}}}'.encode()
    header += b" " * (-len(header) % 8)
    path = folder / PAYLOAD
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        left = 2 * rows * width
        while left:
            file.write(secrets.token_bytes(min(left, 1 << 22)))
            left -= min(left, 1 << 22)
    return path


def bad_bytes(copy: Path, payload: Path) -> int:
    """Return the number of bytes of a copy that differ from the payload."""
    if not copy.is_file():
        return payload.stat().st_size
    mine, right = (np.fromfile(path, dtype=np.uint8) for path in (copy, payload))
    common = min(len(mine), len(right))
    return int(np.count_nonzero(mine[:common] != right[:common])) + abs(len(mine) - len(right))
