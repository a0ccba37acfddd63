"""`make release`: the same bytes from two builds, complete hashes, and a bill of materials that follows the lock."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.installers.test_files import FOLDER, ROOT, pins

SCRIPT = FOLDER / "release.py"


def release(folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(SCRIPT), str(folder)]
    return subprocess.run(command, env=os.environ | more, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "dist"
    run = release(folder)
    assert run.returncode == 0, run.stderr
    return folder


def sums(folder: Path) -> dict[str, str]:
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


def test_two_builds_are_the_same_whatever_the_clock_the_zone_and_the_permissions(built: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    before = os.umask(0o077)
    try:
        run = release(again, SOURCE_DATE_EPOCH="1", TZ="Asia/Tokyo", LC_ALL="C", PYTHONHASHSEED="7")
    finally:
        os.umask(before)
    assert run.returncode == 0, run.stderr
    assert sums(again) == sums(built)
    assert (again / "SHA256SUMS").read_bytes() == (built / "SHA256SUMS").read_bytes()


def test_every_file_has_its_hash(built: Path) -> None:
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in built.iterdir()}
    del files["SHA256SUMS"]
    assert files == sums(built)
    assert sorted(Path(name).suffix for name in files) == [".gz", ".json", ".md", ".whl"]


def test_the_changes_are_those_of_the_version(built: Path) -> None:
    text = (built / "CHANGES.md").read_text()
    assert re.match(r"## \[\d+\.\d+\.\d+\]", text)
    assert text.count("\n## ") == 0
    assert text.strip() in (ROOT / "CHANGELOG.md").read_text()


def test_the_bill_of_materials_names_every_locked_package_and_the_wheel(built: Path) -> None:
    bill = json.loads(next(built.glob("*.cdx.json")).read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    named = {part["name"]: part["version"] for part in bill["components"]}
    assert named == pins(FOLDER / "node.lock")
    assert all(any(entry["name"] == "lock:sha256" for entry in part["properties"]) for part in bill["components"])
    wheel = next(built.glob("*.whl"))
    assert bill["metadata"]["component"]["hashes"][0]["content"] == sums(built)[wheel.name]
    references = [part["bom-ref"] for part in bill["components"]]
    assert len(references) == len(set(references))


def test_files_of_an_earlier_release_are_not_mixed_with_a_new_one(built: Path) -> None:
    run = release(built)
    assert run.returncode == 1
    assert "is not empty" in run.stderr
