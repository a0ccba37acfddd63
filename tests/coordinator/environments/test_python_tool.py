"""Snippets run in fresh processes within their limits, and none outlives its run."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.environments.python_tool import SnippetLimits, SnippetResult, python, run_snippet
from coordinator.environments.tool_schemas import schema_of

PATIENT = SnippetLimits(wall_s=60.0, cpu_s=20)
"""Far above what a snippet of these tests needs, on the busiest machine."""


def run(code: str, **more: Any) -> SnippetResult:
    return asyncio.run(run_snippet(code, limits=more.pop("limits", PATIENT), **more))


def test_a_snippet_has_output_errors_and_a_value() -> None:
    result = run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nx = 6\nx * 7")
    assert result == SnippetResult("ok", "out\n", "err\n", "42")
    assert run("x = 1") == SnippetResult("ok")
    assert run("") == SnippetResult("ok")
    assert run("print('a', end='')").stdout == "a"


def test_an_exception_is_shown_with_its_line_and_without_our_code() -> None:
    result = run("def f():\n    return 1 / 0\n\nf()")
    assert result.status == "error"
    assert result.reason == "ZeroDivisionError: division by zero"
    assert "return 1 / 0" in result.stderr
    assert "snippet_child" not in result.stderr
    assert run("1 +").reason.startswith("SyntaxError")
    assert run("x = '\\ud800'\nraise ValueError(x)").reason == "ValueError: ?"


def test_the_input_belongs_to_the_snippet() -> None:
    assert run("print(sum(map(int, input().split())))\nprint(input())", stdin="1 2\né\n").stdout == "3\né\n"
    assert run("input()").reason.startswith("EOFError")


def test_checks_run_in_the_names_of_the_snippet() -> None:
    checks = ["assert f(1) == 2", "assert f(2) == 2", "assert g(1)", "assert f(0) == 1"]
    result = run("def f(x):\n    print('called')\n    return x + 1", checks=checks)
    assert (result.status, result.passed, result.stdout) == ("error", 2, "called\n" * 3)
    assert run("def f(x): return x + 1", checks=checks[:1]).status == "ok"
    assert run("raise ValueError", checks=["assert True"]).passed == 0


def test_the_end_of_a_program_is_no_error() -> None:
    assert run("import sys\nif __name__ == '__main__':\n    sys.exit()").status == "ok"
    assert run("exit(3)").reason == "SystemExit: 3"
    assert run("import os\nos._exit(3)") == SnippetResult("crash", reason="It ended itself with code 3.")


@pytest.mark.parametrize(
    ("code", "limits", "status"),
    [
        ("import threading\nthreading.Event().wait()", SnippetLimits(wall_s=0.5), "timeout"),
        ("while True: pass", SnippetLimits(wall_s=60.0, cpu_s=1), "crash"),
        ("10 ** 10 ** 9", SnippetLimits(wall_s=60.0, cpu_s=1), "crash"),
        ("x = bytearray(2 ** 30)", SnippetLimits(wall_s=60.0, memory_mib=256), "error"),
        ("while True: print('x' * 1000)", SnippetLimits(wall_s=60.0, output_bytes=10_000), "output"),
        ("open('f', 'wb').write(bytes(2 ** 21))", SnippetLimits(wall_s=60.0, file_mib=1), "error"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", PATIENT, "crash"),
        ("def f(): f()\nf()", PATIENT, "error"),
        ("import sys\nsys.stdout.close()\nsys.stderr = None\n1 / 0", PATIENT, "error"),
        ("raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})", PATIENT, "error"),
    ],
)
def test_limits_end_a_snippet_and_the_result_says_so(code: str, limits: SnippetLimits, status: str) -> None:
    result = run(code, limits=limits)
    assert result.status == status
    assert result.reason
    assert len(result.stdout) <= limits.output_bytes


def test_a_snippet_sees_no_secret_and_none_of_our_modules() -> None:
    known = {"HOME", "TMPDIR", "PATH", "LANG", "LC_CTYPE", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE"}
    known |= {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"}
    assert run(f"import os\n{{*os.environ}} - {known}").value == "set()"
    assert run("import sys\n[path for path in sys.path if 'environments' in path]").value == "[]"


def test_runs_answer_the_same() -> None:
    code = "import random\nprint({*'abcdef'}, random.random())"
    assert run(code) == run(code)


def test_its_folder_is_new_and_gone_afterwards() -> None:
    folder = run("import os\nopen('file', 'w').write('x')\nprint(os.getcwd())").stdout.strip()
    assert not os.path.exists(folder)  # noqa: PTH110  # a text that the snippet has printed
    assert run("import os\nos.listdir()").value == "[]"


@pytest.mark.parametrize("end", ["", "os._exit(0)", "while True: pass"])
def test_processes_of_a_snippet_end_with_it(end: str) -> None:
    code = f"import os, time\nif not os.fork():\n    time.sleep(600)\nprint(os.getpgid(0), flush=True)\n{end}"
    group = int(run(code, limits=SnippetLimits(wall_s=3.0)).stdout)
    alive = [each for each in psutil.process_iter() if _group(each) == group]
    _, still = psutil.wait_procs(alive, timeout=30)  # a process that was killed needs a moment to go
    assert still == []


PARENT = """
import asyncio, sys
from coordinator.environments.python_tool import SnippetLimits, run_snippet
asyncio.run(run_snippet(sys.argv[1], limits=SnippetLimits(wall_s=600.0)))
"""


def test_a_snippet_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = f"import os, time\nopen({str(pipe)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", PARENT, code]) as parent:
        snippet = psutil.Process(int(pipe.read_text()))
        parent.kill()
    _, still = psutil.wait_procs([snippet], timeout=30)
    assert still == []


def _group(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return 0


def test_the_tool_returns_what_a_person_would_see() -> None:
    assert asyncio.run(python("print('a')\n1 + 1")) == "a\n2"
    assert asyncio.run(python("x = 1")) == "(no output)"
    assert asyncio.run(python("1 / 0")).endswith("ZeroDivisionError: division by zero")
    assert asyncio.run(python("import os\nos._exit(1)")) == "Error: It ended itself with code 1."
    assert list(schema_of(python)["function"]["parameters"]["properties"]) == ["code"]
