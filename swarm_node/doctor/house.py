"""The home and what lies in it: may it be written, is the key its owner's alone, and is an agent running in it?"""

import os
import stat
import tempfile
from pathlib import Path

from protocol.errors import SwarmError
from swarm_node.doctor.report import CheckResult, fail, ok, skip, warn
from swarm_node.keys import identity
from swarm_node.owner.control_socket import FOLDER, PORT, SOCKET


def home(folder: Path) -> CheckResult:
    """Whether files can be made where the node keeps them."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor."):
            pass
    except OSError as error:
        said = f"The node's folder cannot be written: {os.strerror(error.errno or 0)}."
        return fail("home", said, str(place), "Name a folder of yours with --home, or mend its permissions.")
    return ok("home", "The node's folder can be written.", str(folder))


def key(folder: Path) -> CheckResult:
    """Whether the key is sound, and nobody else's to read."""
    path = folder / identity.FILE
    if not path.exists():
        return skip("key", "There is no key yet; the first `join` makes one.")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        said = "Others on this machine can read the node's key, and work and speak in its name."
        return fail(
            "key", said, f"mode {mode:04o}", f"chmod 600 {path}; if others use this machine, `swarm-node keys rotate`."
        )
    try:
        me = identity.load_or_create(path).key.node_id
    except SwarmError as error:
        return fail("key", error.message, str(path), error.hint)
    if path.stat().st_uid != os.getuid():
        said = "The key belongs to another user of this machine."
        return warn("key", said, f"uid {path.stat().st_uid}", "Run the node as one user only.")
    return ok("key", "The key is sound and its owner's alone.", f"mode {mode:04o}, node {me}")


def agent(folder: Path) -> CheckResult:
    """Whether an agent runs already: figures are then those of a machine at work."""
    if any((folder / FOLDER / name).exists() for name in (SOCKET, PORT)):
        said = "An agent is running in this home, or was killed; speed and memory are what it leaves."
        return ok("agent", said, "`swarm-node status` tells")
    return ok("agent", "No agent is running in this home.")
