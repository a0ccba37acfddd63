"""A case folder from a stranger: whatever is in it, there is a case that was signed, or a named error, and no hang."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.audit.case import FILE, NEIGHBOURS_MAX, POLICIES, open_case
from coordinator.rules import calibration
from protocol.errors import AuditFailed
from protocol.policy.manifest import Sampler
from protocol.wire.signing import NodeKey
from protocol.work.auditing import CaseFile
from protocol.work.lease import Lease
from protocol.work.rollout import RolloutClaim, Sample, pack_logprobs, pack_tokens

KEY, ROUND = NodeKey(bytes(32)), "0" * 64


@pytest.fixture
def case(policy: Path, tmp_path: Path) -> Path:
    """A sound case folder of version 2, with a neighbour."""
    for version in ("1", "2"):
        shutil.copytree(policy, tmp_path / "case" / POLICIES / version)
    write(tmp_path / "case", [19, 20, 31])
    return tmp_path / "case"


def write(folder: Path, prompt: list[int]) -> None:
    terms: dict[str, Any] = {"lease_id": "0" * 32, "version": 2, "seed": 7}
    lease = Lease(**terms, samples=1, prompt=pack_tokens(prompt), price_micros_per_mtok=1, expires_ms=1)
    sample = Sample(tokens=pack_tokens([5, 6]), logprobs=pack_logprobs([-1.0, -1.0]), finish="length")
    claim = RolloutClaim(round_id=ROUND, lease_id=lease.lease_id, lease_digest=lease.digest, samples=(sample,))
    file = CaseFile(
        round_id=ROUND,
        lease=lease.to_bytes(),
        rollout=KEY.seal("rollout", claim.to_bytes()),
        sampler=Sampler(temperature=1.0, max_new_tokens=2),
    )
    (folder / FILE).write_bytes(file.to_bytes())


def test_a_sound_case_is_what_was_signed(case: Path) -> None:
    opened = open_case(case)
    assert (opened.node, opened.lease.version, opened.neighbours) == (KEY.node_id, 2, (1,))


def test_folders_that_are_no_versions_are_no_neighbours(case: Path) -> None:
    for name in ("\u00b2", "01", "+3", "0", "3.new", "\u0663"):  # a superscript and an Arabic digit
        (case / POLICIES / name).mkdir()
    assert open_case(case).neighbours == (1,)


def swell(file: Path) -> None:
    with file.open("r+b") as opened:
        os.truncate(opened.fileno(), 2**40)


def crowd(case: Path) -> None:
    for version in range(3, 3 + NEIGHBOURS_MAX):
        (case / POLICIES / str(version)).mkdir()


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a terabyte of case": lambda case: swell(case / FILE),
    "a hundred versions": crowd,
    "a prompt beyond the vocabulary": lambda case: write(case, [19, 2**32 - 1]),
    "no configuration": lambda case: (case / POLICIES / "2" / "config.json").unlink(),
    "a configuration without a vocabulary": lambda case: (case / POLICIES / "2" / "config.json").write_text("{}"),
    "a configuration that is a list": lambda case: (case / POLICIES / "2" / "config.json").write_text("[]"),
    "a configuration that nests": lambda case: (case / POLICIES / "2" / "config.json").write_text("[" * 10**6),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_case_folder_is_refused_by_name(case: Path, how: str) -> None:
    HOSTILE[how](case)
    with pytest.raises(AuditFailed):
        open_case(case)


def test_a_terabyte_of_tolerances_is_refused(case: Path) -> None:
    file = case / calibration.FILE
    file.touch()
    swell(file)
    with pytest.raises(AuditFailed, match="larger"):
        calibration.read(file)
