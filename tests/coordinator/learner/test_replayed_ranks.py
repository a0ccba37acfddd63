"""Updates of several ranks are replayed by as many, to the bit: real processes, which talk over gloo."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from coordinator.base.children import script
from coordinator.commands.audit import MISMATCH, NO_VERDICT
from coordinator.learner import launch
from protocol.work.learning import KeptBatch
from protocol.work.rollout import pack_tokens
from tests.coordinator.learner import replayed_ranks

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def learned(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[bool]]]:
    """Return the folder of updates that two ranks made, of another rate by the log, and what replays of it said."""
    folder = tmp_path_factory.mktemp("learned")
    command = [sys.executable, "-m", replayed_ranks.__name__, str(policy_folder), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, [json.loads(line) for line in done.stdout.splitlines()]


def audit(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [script("swarm-coordinator"), "audit", "update", str(folder)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def test_two_ranks_come_to_the_states_of_an_honest_learner_and_to_no_other_with_another_rate(
    learned: tuple[Path, list[list[bool]]],
) -> None:
    assert learned[1] == [[True, True], [True, True], [False, False]]


def test_a_rank_that_is_killed_ends_the_replay_without_a_verdict(learned: tuple[Path, list[list[bool]]]) -> None:
    command = [script("swarm-coordinator"), "audit", "update", str(learned[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as replay:
        launcher = psutil.Process(replay.pid)
        while len(ranks := launcher.children()) < 2:
            assert replay.poll() is None
        ranks.sort(key=lambda rank: rank.pid)
        ranks[1].kill()
        said, errors = replay.communicate()
    assert replay.returncode == NO_VERDICT, errors
    assert "no verdict: rank 1 of 2 was ended by signal 9 before the replay was over" in said
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
def test_the_command_gives_the_verdict_of_whichever_rank_found_it(learned: tuple[Path, list[list[bool]]]) -> None:
    folder = learned[0]
    assert audit(folder)[0] == MISMATCH
    replayed_ranks.commit(folder, learning_rate=1e-3)
    code, said = audit(folder)
    assert code == 0
    assert said.count("to the bit") == 2

    kept = KeptBatch.read((folder / "batches" / "1").read_bytes())
    for number in range(len(kept.groups[0].samples)):  # one rank alone has this sample
        samples = list(kept.groups[0].samples)
        tokens = [10**6] * (len(samples[number].tokens) // 4)
        samples[number] = samples[number].model_copy(update={"tokens": pack_tokens(tokens)})
        replayed_ranks.replace_batch(folder, 1, (kept.groups[0].model_copy(update={"samples": tuple(samples)}),))
        code, said = audit(folder)
        assert code == MISMATCH
        assert "Batch 1 as served cannot be used: IndexError" in said


GRACE_S = 0.5
"""The time that ranks of these tests get to end by themselves."""

LOSES = "import os, sys, time; rank = int(os.environ['RANK']); print('I am', rank, flush=True)\n"


@pytest.mark.parametrize(
    ("program", "codes", "failed", "said"),
    [
        ("", (0, 0, 0), None, ("", "I am 1", "I am 2")),
        ("rank == 2 and sys.exit(4); sys.stdin.read()", (-2, 0, 4), 2, ("", "I am 1", "I am 2")),
        (
            "rank == 0 and sys.exit(6); time.sleep(0.2); sys.exit(4 * (rank == 1))",
            (6, 4, 0),
            1,
            ("", "I am 1", "I am 2"),
        ),
        ("rank == 2 and os.kill(os.getpid(), 9); sys.stdin.read()", (-2, 0, -9), 2, ("", "I am 1", "I am 2")),
    ],
)
def test_ranks_end_with_the_first_that_fails(
    program: str, codes: tuple[int, ...], failed: int | None, said: tuple[str, ...]
) -> None:
    words = f"import sys; from coordinator.learner import launch; ranks = [sys.executable, '-c', {LOSES + program!r}]"
    code = f"{words}; launch.GRACE_S = {GRACE_S}; print(launch.run_quietly(ranks, 3))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["I am 0", str(launch.RanksEnd(codes, failed, said))]
