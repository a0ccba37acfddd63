"""The learner's log: one short line for each update, and no progress bars of libraries in a file."""

import subprocess
import sys

from coordinator.learner.loop import _log_line

METRICS = {
    "reward/mean": 0.4321, "reward/std": 0.2, "learner/grad_norm": 0.01234, "is/masked_frac": 0.025, "clip/low": 0.0,
    "staleness/mean": 1.25, "staleness/max": 3.0, "eval/exploitability": 0.5, "learner/skipped": 0.0,
}  # fmt: skip


TIMES = {"wait": 12.34, "train": 5.678}


def test_an_update_is_one_line_of_a_terminal() -> None:
    line = _log_line(METRICS, TIMES)
    assert line == ("reward=0.432 gradient=0.0123 age=1.2 dropped=2% exploitability=0.500 wait_s=12.3 train_s=5.7")
    assert len(f"18:00:00 INFO update=1000/1000 {line}") <= 140


def test_the_line_of_a_long_answered_round_still_fits() -> None:
    more = {"entropy": 0.4123, "length/mean": 1312.4, "length/truncated": 0.034}
    line = _log_line({name: METRICS[name] for name in METRICS if not name.startswith("eval/")} | more, TIMES)
    assert "entropy=0.412 length=1312 cut=3%" in line
    assert len(f"18:00:00 INFO update=1000/1000 {line}") <= 140


def test_an_update_without_a_step_says_so() -> None:
    assert _log_line(METRICS | {"learner/skipped": 1.0}, {}).endswith(" skipped")


def test_no_progress_bar_of_a_library_gets_into_a_log_file() -> None:
    program = (
        "from coordinator.base import logs; logs.to_stderr(quiet=False); import logging, tqdm; "
        "[0 for _ in tqdm.tqdm(range(3))]; logging.info('done')"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stderr.endswith(" INFO done\n")
    assert "%|" not in ran.stderr
