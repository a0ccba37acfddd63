"""The packages that `make test-gpu` installs: all that its tests import, beside what a machine with a GPU has."""

import re
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution, requires
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTALLED = Path(sysconfig.get_paths()["purelib"])
THERE = ("torch", "transformers", "numpy", "pytest")


def plain(name: str) -> str:
    """Return the name of a package as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def with_needs(names: tuple[str, ...]) -> set[str]:
    """Return these packages and all that they need and that is installed here, optional ones left out."""
    installed = {plain(path.name.split("-")[0]) for path in INSTALLED.glob("*.dist-info")}
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        if (name := plain(waiting.pop())) in installed - found:
            found.add(name)
            waiting += [re.split(r"[^\w.-]", need)[0] for need in requires(name) or [] if "extra ==" not in need]
    return found


def link(name: str, folder: Path) -> None:
    """Link all files of a package into a folder."""
    for file in distribution(name).files or ():
        top = file.parts[0]
        if top not in ("..", "__pycache__") and not (folder / top).exists():
            (folder / top).symlink_to(INSTALLED / top)


def test_every_package_that_the_tests_import_is_named(tmp_path: Path) -> None:
    files = [path for place in ("tests/gpu", "bench/gpu") for path in (ROOT / place).glob("[!_]*.py")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files] + ["bench.gpu.__main__"]
    lines = (ROOT / "tests/gpu/requirements.txt").read_text().splitlines()
    for name in {plain(line) for line in lines if line[:1].isalpha()} | with_needs(THERE):
        link(name, tmp_path)
    run = subprocess.run(
        [sys.executable, "-S", "-P", "-c", "\n".join(f"import {module}" for module in modules)],
        cwd=ROOT,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-1000:]
