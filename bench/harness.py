"""The one form of every bench: measure, compare within the same run, judge by goals, leave a record.

- A bench prints each value when it is measured, then a table; it writes `bench/results/NAME.json`. Its last line is
  `RESULT NAME met` or `RESULT NAME missed: WHICH`; its exit status is 0 only if every goal is met.
- The record holds the inputs, the machine, the date and every measured value, so that a median can be doubted later.
- What is compared is measured in turns, round by round; a ratio is the median of the ratios of the rounds, which a
  machine that is busy for a while disturbs less than two medians taken apart.
- `QUICK=1` asks for a smaller run; the bench reads `quick` and says its sizes in `inputs`.
- A `Child` is a contender in a process of its own, whose peak memory is its own, too. It computes only while asked.

    bench = Bench("chunks", inputs={"chunk_mib": 4})
    for _ in range(9):
        bench.measure("sha256", speed_of(sha256), unit="MB/s")
        bench.measure("blake3", speed_of(blake3), unit="MB/s")
    bench.goal("blake3 is at least 3 times as fast", bench.ratio("blake3 / sha256", "blake3", "sha256"), at_least=3.0)
    return bench.finish()
"""

import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]

Input = str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float]


@dataclass
class Case:
    """All values of one case, in the order in which they were measured."""

    unit: str
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.values)


@dataclass(frozen=True)
class Ratio:
    """Two cases compared round by round."""

    of: str
    to: str
    values: list[float]

    @property
    def median(self) -> float:
        return median(self.values)


@dataclass(frozen=True)
class Goal:
    """A bound that the run must keep, and whether it did."""

    value: float
    at_least: float | None
    at_most: float | None
    met: bool

    @property
    def bound(self) -> str:
        bounds = (("≥", self.at_least), ("≤", self.at_most))
        return " and ".join(f"{sign} {_figure(bound)}" for sign, bound in bounds if bound is not None)


def quick_from_environment() -> bool:
    """Return True if `QUICK=1` asks for a smaller run."""
    return os.environ.get("QUICK", "") not in ("", "0")


def no_options(explained: str | None) -> None:
    """End with `--help`, or for any other word, where a bench has nothing to choose."""
    ArgumentParser(description=explained, formatter_class=RawDescriptionHelpFormatter).parse_args()


def machine() -> dict[str, str | int]:
    """Return the facts about the machine that a reader needs to judge the figures."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = (line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line)
        cpu = next(names, cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count() or 1,
        "memory_mib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


class Child:
    """A contender in a process of its own: a line of JSON goes in, one comes out."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # it lives as long as the child
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        )
        self.ready = self._answer()
        """The child's first line, once it has loaded everything."""

    def ask(self, question: object) -> dict[str, Any]:
        """Have it compute, and return its answer."""
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print what they like
                answer: dict[str, Any] = json.loads(line)
                return answer
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-2000:]
        self.close()
        raise RuntimeError(f"A contender ended with {status}:\n{said}")

    def close(self) -> None:
        """End it."""
        with self._process:  # closes its pipes, whereupon it ends
            self._errors.close()


def serve(work: Callable[[Any], Mapping[str, object]]) -> None:
    """Answer what a parent asks of this process, each time with the peak of its memory."""
    print(json.dumps({"peak": peak_mib()}), flush=True)
    for line in sys.stdin:
        answer = dict(work(json.loads(line)))
        print(json.dumps(answer | {"peak": peak_mib()}), flush=True)


def peak_mib() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Bench:
    """A run of a bench."""

    def __init__(
        self, name: str, *, inputs: Mapping[str, Input], results: Path = RESULTS, quick: bool | None = None
    ) -> None:
        self.name = name
        self.quick = quick_from_environment() if quick is None else quick
        self._inputs = dict(inputs)
        self._path = results / f"{name}.json"
        self._cases: dict[str, Case] = {}
        self._ratios: dict[str, Ratio] = {}
        self._goals: dict[str, Goal] = {}

    def measure(self, case: str, value: float, *, unit: str = "") -> None:
        """Record one value of a case, and print it at once; the unit is that of its first value."""
        self._require_finite(case, value)
        self._cases.setdefault(case, Case(unit)).values.append(float(value))
        print(f"{case}: {_figure(value)} {unit}".rstrip(), file=sys.stderr, flush=True)

    def median(self, case: str) -> float:
        """The median of a case so far."""
        return self._cases[case].median

    def ratio(self, name: str, of: str, to: str) -> float:
        """Compare two cases that were measured in turns: the median of the ratios of the rounds."""
        pairs = zip(self._cases[of].values, self._cases[to].values, strict=True)
        self._ratios[name] = Ratio(of, to, [upper / lower for upper, lower in pairs])
        return self._ratios[name].median

    def goal(self, name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> bool:
        """Judge a value by its bounds."""
        if at_least is None and at_most is None:
            raise ValueError(f"{self.name}: the goal {name!r} has no bound")
        self._require_finite(name, value)
        met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        self._goals[name] = Goal(value, at_least, at_most, met)
        return met

    def check(self, name: str, ok: bool) -> bool:
        """Judge something that is either so or not."""
        return self.goal(name, float(ok), at_least=1.0)

    def finish(self) -> int:
        """Print the table, write the record, end with the RESULT line; the exit status of the program."""
        if not self._goals:
            raise ValueError(f"{self.name}: a bench without a goal cannot be met or missed")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._record(), indent=2, ensure_ascii=False) + "\n")
        print(self._table())
        missed = [name for name, goal in self._goals.items() if not goal.met]
        print(f"RESULT {self.name} missed: {', '.join(missed)}" if missed else f"RESULT {self.name} met", flush=True)
        return 1 if missed else 0

    def _record(self) -> dict[str, object]:
        return {
            "name": self.name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "quick": self.quick,
            "machine": machine(),
            "inputs": self._inputs,
            "cases": {name: {**asdict(case), "median": case.median} for name, case in self._cases.items()},
            "ratios": {name: {**asdict(ratio), "median": ratio.median} for name, ratio in self._ratios.items()},
            "goals": {name: asdict(goal) for name, goal in self._goals.items()},
            "met": all(goal.met for goal in self._goals.values()),
        }

    def _table(self) -> str:
        rows = [("case", "median", "min", "max", "n", "unit")]
        rows += [(name, *_spread(case.values), case.unit) for name, case in self._cases.items()]
        rows += [(name, *_spread(ratio.values), "×") for name, ratio in self._ratios.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, *figures, unit in rows:
            columns = [figure.rjust(width) for figure, width in zip(figures, widths[1:-1], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *columns, unit]).rstrip())
        for name, goal in self._goals.items():
            lines.append(f"{'met   ' if goal.met else 'missed'}  {name}: {_figure(goal.value)} ({goal.bound})")
        return "\n".join(lines)

    def _require_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise ValueError(f"{self.name}: {what} came out as {value}, which is no measurement")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _spread(values: Sequence[float]) -> tuple[str, str, str, str]:
    return _figure(median(values)), _figure(min(values)), _figure(max(values)), str(len(values))
