"""Distribution: what is installed under our names is ours, and the wheel holds nothing else.

- libp2p's wheel puts `examples`, `docs`, `interop`, `stubs` and `newsfragments` beside everybody's packages; a
  neighbour that took one of our names would be imported in our place.
"""

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.tidy.repository import ROOMS, ROOT, files

NAME = "echo-swarm"
SCRIPTS = {
    "swarm-coordinator": "coordinator.__main__:main",
    "swarm-node": "swarm_node.__main__:main",
    "echo-swarm-tinker": "echo_swarm.tinker.__main__:main",
}
HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "sqlalchemy",
    "alembic",
    "aiohttp",
    "httpx",
    "libp2p",
    "tuf",
    "boto3",
    "nacl",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel as a release would build it, with the build backend that is installed here."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-P", "-c", build, str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


@pytest.mark.parametrize("package", [*ROOMS, "bench", "tests"])
def test_no_other_distribution_claims_our_names(package: str) -> None:
    owners = set(importlib.metadata.packages_distributions().get(package, []))
    assert owners <= {NAME}


@pytest.mark.parametrize("package", [*ROOMS, "bench", "tests"])
def test_our_names_are_imported_from_here(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / package / "__init__.py"


def test_the_wheel_holds_our_rooms_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(ROOMS)


def test_the_wheel_holds_every_file_of_the_rooms(wheel: zipfile.ZipFile) -> None:
    ours = {path.as_posix() for path in files() if path.parts[0] in ROOMS}
    assert ours <= set(wheel.namelist())


def test_the_wheel_declares_the_programs(wheel: zipfile.ZipFile) -> None:
    entry_points = next(name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    declared = dict(re.findall(r"^([\w-]+) = ([\w.:]+)$", wheel.read(entry_points).decode(), re.MULTILINE))
    assert declared == SCRIPTS


@pytest.mark.parametrize("target", SCRIPTS.values())
def test_each_program_starts_at_a_function(target: str) -> None:
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def normal(name: str) -> str:
    """A distribution's name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("program", ["coordinator.cli", "swarm_node.cli"])
def test_help_loads_no_heavy_library(program: str) -> None:
    """Every command pays for what its program imports: the heavy libraries are imported where they are used."""
    show = f"import sys, {program}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-P", "-c", show], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_every_dependency_gives_its_reason_and_is_pinned() -> None:
    """A comment beside each in pyproject.toml; one exact version of each in constraints.txt."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    project = tomllib.loads("\n".join(lines))["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    pins = [line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert len(pins) == len(set(pins))
    pinned = {normal(pin) for pin in pins}
    for requirement in wanted:
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None
        assert normal(name[0]) in pinned, requirement
        assert any(f'"{requirement}",' in line and "#" in line for line in lines), f"{requirement}: no reason beside it"
