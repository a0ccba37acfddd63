"""The attacks of outsiders, played by pytest in processes of its own: which tests passed, failed or did not run.

- An attack was withstood if each of its tests passed, in every form that could run here; what was skipped in all its
  forms was not played, and what was not played was not withstood.
- Kept and shared as campaigns are (`tests.adversaries.tournament`), but for what failed: the next run tries that again,
  since programs have deadlines, and a machine may be too busy. What the tests said is beside it, as a log.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from xml.etree import ElementTree

from coordinator.base.files import write_durably
from tests.adversaries.outsiders import Outsider
from tests.adversaries.tournament import alone

ROOT = Path(__file__).parents[2]

PATIENCE_S = 1_800
"""The time limit of all tests of one attack, beside whatever else this machine does; each has deadlines of its own."""

HEADING = """\
| attack | played by | withstood |
|---|---|---|"""

Ends = dict[str, str]
"""Test → `passed`, `failed` or `skipped`."""


def play(folder: Path, waiting: Sequence[Outsider]) -> None:
    """Play what nobody has seen withstood, and nobody is playing."""
    for outsider in waiting:
        kept = place(folder, outsider)
        with alone(kept.with_suffix(".lock")) as mine:
            if mine and not _stood(kept) and (ends := tried(outsider, kept.with_suffix(".log"))):
                write_durably(kept, json.dumps(ends).encode())


def played(folder: Path, wanted: Sequence[Outsider]) -> Iterator[tuple[Outsider, Ends]]:
    """Return the results of the trials that are done."""
    for outsider in wanted:
        kept = place(folder, outsider)
        if kept.exists():
            yield outsider, json.loads(kept.read_text())


def tried(outsider: Outsider, log: Path) -> Ends:
    """Run its tests; how each ended, of several forms the worst that ran. Nothing, if they came to no end."""
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", f"--junit-xml={report}", *outsider.ids]
    with log.open("wb") as said, suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, timeout=PATIENCE_S, check=False)
    if not report.exists():
        return {}
    ends: Ends = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test, order = case.get("name", "").partition("[")[0], ("skipped", "passed", "failed")
        ends[test] = max(ends.get(test, "skipped"), _end(case), key=order.index)
    return ends


def show(done: Sequence[tuple[Outsider, Ends]], wanted: int) -> bool:
    """Print a row for each attack; whether so many were played, and all withstood."""
    print(f"\n{HEADING}")
    sound = len(done) == wanted
    if not sound:
        print(f"played: {len(done)} of {wanted}; nothing is said of the others")
    for outsider, ends in done:
        missed = [f"{test}: {end}" for test, end in ends.items() if end != "passed"]
        missed += [f"{id_}: not run" for id_ in outsider.ids if id_.split("::")[-1] not in ends]
        print(f"| {outsider.attack} | {outsider.played_by} | {'; '.join(missed) or 'yes'} |", flush=True)
        sound &= not missed
    return sound


def _stood(kept: Path) -> bool:
    return kept.exists() and set(json.loads(kept.read_text()).values()) == {"passed"}


def _end(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    return "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"


def place(folder: Path, outsider: Outsider) -> Path:
    """The file of a trial; with other tests it is another one."""
    tests = blake2b("\n".join(outsider.ids).encode(), digest_size=4).hexdigest()
    return folder / f"{outsider.name}-{tests}.json"
