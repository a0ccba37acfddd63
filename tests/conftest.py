"""What all tests share: properties are not timed, since a busy machine is no counterexample; and a tiny disk."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; needs a user who may mount one."""
    target = tmp_path / "tiny"
    target.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", target], capture_output=True)
    if mounted.returncode != 0:
        # Mounting needs root; a file size limit, which does not, is tested as a full disk everywhere.
        pytest.skip("this user may not mount a small file system")
    yield target
    subprocess.run(["umount", target], check=True)
