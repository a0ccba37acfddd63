"""Fixtures of the node's tests."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; needs a user who may mount one."""
    target = tmp_path / "tiny"
    target.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", target], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a small file system")
    yield target
    subprocess.run(["umount", target], check=True)
