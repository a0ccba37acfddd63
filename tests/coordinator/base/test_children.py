"""Child processes: started again after a crash, left alone after a refusal, and gone with their keeper."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from coordinator.base.children import Life, keep_running, script, why_it_ended

DEADLINE_S = 30.0


def child(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.mark.asyncio
async def test_child_that_crashes_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The child crashes the first time, since the file is not there yet. What it wrote before is not its reason."""
    (tmp_path / "log").write_text("an error of the run before\n")
    mark = tmp_path / "mark"
    program = f"import pathlib, sys; p = pathlib.Path({str(mark)!r}); done = p.exists(); p.touch(); sys.exit(not done)"
    async with asyncio.timeout(DEADLINE_S):
        await keep_running("child", child(program), log_file=tmp_path / "log")
    assert mark.exists()
    assert "child ended with code 1; starting it again in 0.5 s (see " in caplog.text


@pytest.mark.asyncio
async def test_a_killed_child_is_not_explained_by_a_line_of_its_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = tmp_path / "mark"
    program = (
        f"import os, pathlib, sys; p = pathlib.Path({str(mark)!r}); done = p.exists(); p.touch()\n"
        "print('12:00:00 INFO published', file=sys.stderr, flush=True); done or os.kill(os.getpid(), 9)"
    )
    async with asyncio.timeout(DEADLINE_S):
        await keep_running("child", child(program), log_file=tmp_path / "log")
    assert "was ended by SIGKILL, perhaps since memory ran out; starting it again in 0.5 s (see " in caplog.text
    assert "published" not in caplog.text


def test_child_that_crashes_on_a_full_disk_has_this_reason(tmp_path: Path) -> None:
    """The log of a child has no room for the error then."""
    (tmp_path / "log").write_text('File "loop.py", line 20')
    assert why_it_ended(tmp_path / "log", 0, full_bytes=0) == 'File "loop.py", line 20'
    assert why_it_ended(tmp_path / "log", 0, full_bytes=2**62) == f"The disk of {tmp_path} is full. Free some space."


def test_an_error_of_several_lines_is_named_by_its_first(tmp_path: Path) -> None:
    error = "Traceback (most recent call last):\n  File 'a.py', line 3\nValidationError: 2 errors\nlogprobs.0\n  nan\n"
    (tmp_path / "log").write_text(f"10:04:47 INFO begins\n{error}")
    assert why_it_ended(tmp_path / "log", 0, full_bytes=0) == "ValidationError: 2 errors"
    (tmp_path / "log").write_text(f"{error}10:04:47 ERROR out of memory\n")
    assert why_it_ended(tmp_path / "log", 0, full_bytes=0) == "10:04:47 ERROR out of memory"


@pytest.mark.processes
def test_the_log_of_a_learner_that_fails_at_a_file_of_its_round_has_the_place_in_its_program(tmp_path: Path) -> None:
    """No person has typed that file."""
    (tmp_path / "resolved.json").mkdir()
    learner = [script("swarm-coordinator"), "learner", str(tmp_path), "--child"]
    with subprocess.Popen(learner, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr is not None
        said = started.stderr.read()
    assert "Traceback" in said
    assert said.rstrip().endswith(f"Is a directory: '{tmp_path / 'resolved.json'}'")


@pytest.mark.asyncio
async def test_child_that_refuses_its_settings_is_not_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts = tmp_path / "starts"
    (tmp_path / "log").write_text("an error of the run before\n")
    refuse = "print('It is \\33too small.', file=sys.stderr); sys.exit(2)"
    program = f"import sys; open({str(starts)!r}, 'a').write('x'); {refuse}"
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(DEADLINE_S):
            await keep_running("child", child(program), log_file=tmp_path / "log")
    assert starts.read_text() == "x"
    assert "refuses its settings and is not started again: It is too small. (see " in caplog.text


@pytest.mark.asyncio
async def test_child_ends_when_its_keeper_is_cancelled(tmp_path: Path) -> None:
    """The child reads standard input, as all of ours do, and leaves when it ends."""
    pids: list[int] = []
    told = asyncio.Event()

    def on_line(line: str) -> None:
        pids.append(int(line))
        told.set()

    program = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    keeper = asyncio.create_task(keep_running("child", child(program), log_file=tmp_path / "log", on_line=on_line))
    async with asyncio.timeout(DEADLINE_S):
        await told.wait()
        keeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeper
    assert not psutil.pid_exists(pids[0])


@pytest.mark.asyncio
async def test_who_keeps_a_child_hears_how_it_fares(tmp_path: Path) -> None:
    """The child crashes the first time, and rejects its settings the second time."""
    mark = tmp_path / "mark"
    program = f"import pathlib, sys; p = pathlib.Path({str(mark)!r}); done = p.exists(); p.touch(); sys.exit(1 + done)"
    heard: list[Life] = []

    async def tell(life: Life) -> None:
        heard.append(life)

    async with asyncio.timeout(DEADLINE_S):
        await keep_running("child", child(program), log_file=tmp_path / "log", tell=tell)
    assert heard == [Life("runs", None, 0), Life("crashed", 1, 1), Life("runs", 1, 1), Life("ended", 2, 1)]
