"""A real PostgreSQL for the ledger's tests and bench: a cluster of its own in a folder, reached by a Unix socket.

- Found where Debian's package puts it, or on the PATH; `missing` says what is not there.
- It refuses to run as root, so root starts it as `postgres`.
- `durable` decides whether a commit waits for the disk: tests of meaning need not, a bench must.
"""

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USER = "postgres"


def binaries() -> Path | None:
    """The folder of `initdb` and `pg_ctl`, the newest version's."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


def missing() -> str:
    """Why no PostgreSQL can be tested here, or nothing."""
    if binaries() is None:
        return "PostgreSQL is not installed (Debian: apt-get install postgresql)"
    if importlib.util.find_spec("psycopg") is None:
        return "its driver is not installed (the extra `postgres`)"
    return ""


@contextmanager
def cluster(*, durable: bool) -> Iterator[str]:
    """A running cluster's URL; the cluster and its files are gone afterwards."""
    here = binaries()
    assert here is not None, missing()
    folder = Path(tempfile.mkdtemp(prefix="ledger-"))
    control = [str(here / "pg_ctl"), "-D", f"{folder}/data", "-w", "-s"]
    options = f"-k {folder} -c listen_addresses= -c fsync={'on' if durable else 'off'}"
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, USER)
        _run(folder, str(here / "initdb"), "-D", f"{folder}/data", "-U", USER, "-A", "trust", "-N", "--locale=C.UTF-8")
        _run(folder, *control, "-o", options, "start")
        try:
            yield f"postgresql+psycopg://{USER}@/postgres?host={folder}"
        finally:
            _run(folder, *control, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


def _run(folder: Path, *command: str) -> None:
    user = USER if os.geteuid() == 0 else None
    # To files and not to pipes: the server inherits them, and a pipe would stay open as long as it runs.
    subprocess.run(command, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
