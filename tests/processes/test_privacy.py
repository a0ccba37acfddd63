"""Other users of the coordinator's machine: they may serve what is public, and read nothing else of a round."""

from pathlib import Path

import pytest

from tests.processes.programs import Swarm, until
from tests.processes.rounds import Coordinator
from tests.processes.training import training

pytestmark = pytest.mark.processes

PUBLIC = {"public", "metadata", "blobs"}


def test_others_may_serve_what_is_public_and_read_nothing_else(swarm: Swarm, policy: Path) -> None:
    coordinator = Coordinator(swarm, training(policy)).start(learner=True, auditor=True)
    folder = coordinator.folder
    coordinator.reaches("version", 1)
    until("the auditor's folder", lambda: (folder / "auditors").is_dir())
    names = {path.name for path in folder.iterdir()}
    assert names >= {*PUBLIC, "keys", "logs", "uploads", "learner", "auditors", "state.db", "state.db-wal"}
    coordinator.program.kill()
    until("its children to leave", lambda: not swarm.members())
    for path in (folder, *folder.rglob("*")):
        mode, inner = path.lstat().st_mode, path.relative_to(folder)
        if path.is_symlink():
            continue
        if path == folder or inner.parts[0] in PUBLIC:
            assert mode & 0o004, path
        else:
            assert not mode & 0o077, path
