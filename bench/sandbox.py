"""`make bench-sandbox`: the cost of the sandbox of task processes, for a start and for each judged group.

- The same reward function runs with the sandbox and without it, in turns. A start includes the imports of Python.
- The function opens a file for each completion, so that each call passes the filter and Landlock.
"""

import asyncio
import tempfile
import time
from pathlib import Path

from bench.harness import Bench, no_options, quick_from_environment
from coordinator.tasks.reward_functions import Job
from coordinator.tasks.sandbox import Sandbox
from coordinator.tasks.task_pool import TaskPool
from coordinator.tasks.task_process import TaskProcessSpec
from protocol.tasks import Problem

FUNCTION = """
def fn(completions, **columns):
    earned = []
    for text in completions:
        with open(__file__, "rb") as file:
            earned.append(float(text in file.read().decode()))
    return earned
"""

SAMPLES = 16
CASES: dict[str, Sandbox | None] = {"without": None, "sandbox": Sandbox()}


async def measured(bench: Bench, case: str, folder: Path, groups: int) -> None:
    """Measure the start of a process, and the judging of a group."""
    functions = ((f"{folder}/r.py:fn", 1.0),)
    pool = TaskPool(TaskProcessSpec(functions, timeout_s=60.0, processes=1, sandbox=CASES[case]))
    job = Job(Problem("p"), ["return"] * SAMPLES, [[1]] * SAMPLES)
    try:
        began = time.perf_counter()
        await pool.judge(job)
        bench.measure(f"start, {case}", 1000 * (time.perf_counter() - began), unit="ms")
        began = time.perf_counter()
        for _ in range(groups):
            await pool.judge(job)
        bench.measure(f"group, {case}", 1000 * (time.perf_counter() - began) / groups, unit="ms")
    finally:
        await pool.close()


def main() -> int:
    no_options(__doc__)
    rounds, groups = (5, 100) if quick_from_environment() else (15, 500)
    bench = Bench("sandbox", inputs={"rounds": rounds, "groups": groups, "samples": SAMPLES})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "r.py").write_text(FUNCTION)
        for _ in range(rounds):
            for case in CASES:
                asyncio.run(measured(bench, case, Path(folder), groups))
    start = bench.ratio("start: sandbox / without", "start, sandbox", "start, without")
    group = bench.ratio("group: sandbox / without", "group, sandbox", "group, without")
    bench.goal("the sandbox costs at most half of a start", start, at_most=1.5)
    bench.goal("the sandbox costs at most half of a group", group, at_most=1.5)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
