"""How much memory an engine child may have, and how much it has."""

import os

import psutil
import pytest

from protocol import limits
from swarm_node.engine import memory


def test_memory_is_allowed_by_the_policy_and_by_what_the_machine_has() -> None:
    giga = 1024 * limits.MIB
    assert memory.allowed_bytes(4 * limits.MIB, 256 * giga) < 9 * giga, "a small policy takes no large machine"
    assert memory.allowed_bytes(16 * giga, 100 * giga) == int(0.85 * 100 * giga)
    assert memory.allowed_bytes(16 * giga, 10 * giga, held_bytes=90 * giga) == int(0.85 * 100 * giga), "its own counts"
    assert memory.allowed_bytes(giga, None) == 40 * giga
    assert memory.resident_by_program(os.getpid()) == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert memory.resident_by_program(2**22 + 1) is memory.resident_bytes(2**22 + 1) is None
