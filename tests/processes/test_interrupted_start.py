"""Ctrl-C in the seconds in which a program still reads its modules ends it in silence."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED = "import os, signal, threading; os.kill(os.getpid(), signal.SIGINT); threading.Event().wait()"


@pytest.mark.parametrize("program", ["coordinator", "swarm_node"])
def test_whoever_interrupts_the_imports_sees_no_traceback(program: str, tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(INTERRUPTED)  # found before the real one
    ended = subprocess.run(
        [sys.executable, "-P", "-m", program, "--help"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it may be ignored here, which is inherited
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
