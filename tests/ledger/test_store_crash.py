"""kill -9 while entries are written: what was acknowledged is there, once, and the tables agree with the log."""

import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from ledger import store
from tests.ledger.engines import sqlite_file
from tests.ledger.values import deposit

KILLS = 5
ROOT = Path(__file__).parents[2]


def append_until_killed(path: Path, acknowledgements: int) -> list[str]:
    """Run the appender, kill it some time after so many acknowledgements, and return all it gave."""
    command = [sys.executable, "-m", "tests.ledger.appender", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        seen = list(islice(child.stdout, acknowledgements))
        child.kill()
        seen += child.stdout.readlines()
    assert child.returncode == -9, "the appender ended by itself"
    return [line.strip() for line in seen]


@pytest.mark.processes
def test_killed_at_any_moment_no_acknowledged_entry_is_lost_or_doubled(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    path = tmp_path / "ledger.sqlite"
    engine = sqlite_file(path)
    with engine.begin() as conn:
        store.create(conn)
        store.append(conn, deposit(10**12), 0)
    engine.dispose()

    acknowledged: list[str] = []
    for kill in range(1, KILLS + 1):
        acknowledged += append_until_killed(path, chance.randint(1, 60))
        with engine.begin() as conn:
            assert store.rebuild(conn) == []
            present = [str(row.content_hash) for row in store.entries(conn, 1, 1_000_000)]
        engine.dispose()
        assert len(set(present)) == len(present)
        assert set(acknowledged) <= set(present)
        # Each kill may hit the moment between a commit and its acknowledgement.
        assert len(present) - len(acknowledged) <= kill
