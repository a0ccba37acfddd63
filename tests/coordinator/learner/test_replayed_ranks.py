"""Updates of several ranks are replayed by as many, to the bit: real processes, which talk over gloo."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import typer

from coordinator.base.children import script
from coordinator.commands.audit import MISMATCH, NO_VERDICT, by_ranks
from coordinator.commands.retract import carry_out_by_ranks
from coordinator.learner import launch
from protocol.work.learning import KeptBatch
from protocol.work.rollout import pack_tokens
from tests.coordinator.learner import replayed_ranks
from tests.processes.programs import until

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

        def started() -> list[psutil.Process]:
            assert replay.poll() is None
            return ranks if len(ranks := launcher.children()) == 2 else []

        ranks = until("both ranks to start", started)
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

LISTENS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""A shell starts what runs in the background without this signal, and ranks inherit that."""

LOSES = "import os, sys, time; rank = int(os.environ['RANK']); print('I am', rank, flush=True)\n"


@pytest.mark.parametrize(
    ("program", "codes", "failed", "said"),
    [
        ("", (0, 0, 0), None, ("", "I am 1", "I am 2")),
        ("rank == 2 and sys.exit(4); sys.stdin.read()", (-2, 0, 4), 2, ("", "I am 1", "I am 2")),
        (
            # Rank 1 reports its mismatch after rank 0 has lost the others.
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
    code = f"{words}; {LISTENS}; launch.GRACE_S = {GRACE_S}; print(launch.run_quietly(ranks, 3))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["I am 0", str(launch.RanksEnd(codes, failed, said))]


def test_a_launcher_that_is_told_to_end_interrupts_rank_0_and_leaves_no_files(tmp_path: Path) -> None:
    words = f"import sys; from coordinator.learner import launch; launch.GRACE_S = {GRACE_S}"
    program = LOSES + "sys.stdin.read() if rank else time.sleep(60)"  # rank 0 works until it is interrupted
    code = f"{words}; {LISTENS}; launch.run_quietly([sys.executable, '-c', {program!r}], 2)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"I am 0\n"
        launcher.terminate()
        _, errors = launcher.communicate()
    assert launcher.returncode == launch.KILLED + signal.SIGTERM
    assert b"KeyboardInterrupt" in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("codes", "failed", "code", "said"),
    [
        ((0, 0), None, 0, ""),
        ((launch.LOST, MISMATCH), 1, MISMATCH, "DOES NOT MATCH: why\n"),
        ((launch.LOST, NO_VERDICT), 1, NO_VERDICT, "DOES NOT MATCH: why\n"),
        (
            (launch.LOST, -9),
            1,
            NO_VERDICT,
            "rank 1 of 2 was ended by signal 9 before the replay was over. Repeat it with",
        ),
        ((1, launch.LOST), 0, NO_VERDICT, "rank 0 of 2 ended with code 1 before the replay was over. The lines above"),
        (
            (launch.LOST, launch.LOST),
            0,
            NO_VERDICT,
            "rank 0 of 2 ended with code 6 before the replay was over. The lines",
        ),
    ],
)
def test_only_a_mismatch_that_a_rank_reports_is_one(
    codes: tuple[int, int],
    failed: int | None,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = launch.RanksEnd(codes, failed, ("", "DOES NOT MATCH: why"))
    monkeypatch.setattr(launch, "run_quietly", lambda _command, _size: ended)
    assert by_ranks(tmp_path, 2) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("codes", "failed", "code", "said"),
    [
        ((launch.LOST, -9), 1, 137, "Rank 1 of 2 ended with code 137"),
        ((launch.LOST, launch.LOST), 0, 1, "Rank 0 of 2 ended with code 6"),
        ((2, launch.LOST), 0, 2, ""),
    ],
)
def test_a_retraction_that_lost_a_rank_has_failed(
    codes: tuple[int, int],
    failed: int,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = launch.RanksEnd(codes, failed, ("", ""))
    monkeypatch.setattr(launch, "run_quietly", lambda _command, _size: ended)
    with pytest.raises(typer.Exit) as raised:
        carry_out_by_ranks(2)
    assert raised.value.exit_code == code
    assert said in capsys.readouterr().err


def test_a_rank_that_loses_another_ends_with_one_line_and_a_lone_process_with_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(launch.STORE, raising=False)
    with pytest.raises(RuntimeError, match="closed by peer"), launch.ending_with_others():
        raise RuntimeError("Connection closed by peer")
    monkeypatch.setenv(launch.STORE, "a file")
    with pytest.raises(SystemExit) as raised, launch.ending_with_others():
        raise RuntimeError("Connection closed by peer\x1b[2J")
    assert raised.value.code == launch.LOST
    assert capsys.readouterr().err == "A rank failed, or lost another: Connection closed by peer\\x1b[2J\n"
