"""The machines that compute an update: what its bits depend on, beside its state, its groups and its settings.

Ranks may be on unlike cards, or on hosts with other libraries. All kinds are recorded then: no other machine has such a
name, so a replay elsewhere that differs blames nobody.
"""

import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch


class Machine(NamedTuple):
    """The machine of one rank."""

    name: str
    software: dict[str, str]


def machine_here(device: str) -> Machine:
    """Return this machine, as far as results depend on it."""
    return Machine(machine(device), software())


def joined(names: Iterable[str]) -> str:
    """Return one name for what all ranks have: each different one, in order."""
    return "; ".join(sorted(set(names)))


def software() -> dict[str, str]:
    """Return the versions of the libraries that compute an update."""
    return {name: version(name) for name in ("torch", "transformers")}


def machine(device: str) -> str:
    """Return what the order of sums depends on: the card's name, or the processor with the instructions that are used.

    Libraries choose their code by the maker and model of a processor, not by its instructions alone.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return " ".join((torch.backends.cpu.get_cpu_capability(), platform.machine(), *_processor()))


def _processor() -> list[str]:
    """Return maker, family and model of the processor, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()]
    values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return [values[name] for name in ("vendor_id", "cpu family", "model") if name in values]
