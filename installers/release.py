"""Builds a release of the current commit: wheel, sdist, bill of materials, changes and hashes. `make release`.

- Only files of the commit are built, from a temporary copy: changed and untracked files have no effect.
- Two builds of one commit are the same byte for byte. The wheel is also the one that install.sh builds from a checkout.
- Nothing is published or signed here.

To release a version:

1. Set `version` in `pyproject.toml`, and the date of its section in `CHANGELOG.md`. Commit, and run `make test` and
   `make test-install`.
2. `make release` writes into `dist`: wheel, sdist, a bill of materials (CycloneDX), `CHANGES.md` and `SHA256SUMS`.
3. On a second machine, `make release` of the same commit must write the same `SHA256SUMS`.
4. Sign `SHA256SUMS`, for example with `minisign -Sm SHA256SUMS` or `ssh-keygen -Y sign -n file -f KEY SHA256SUMS`.
   Publish the public key where the project is described, not beside the files.
5. Tag the commit (`git tag -s v1.2.3`), and upload wheel and sdist to the package index with its own client
   (`uv publish dist/*.whl dist/*.tar.gz`).
6. Attach the other files and the signature to the tag's page. Install the release on a bare system with `install.sh`.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from hatchling.build import build_{kind}; print(build_{kind}(sys.argv[1]))"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a release of the current commit.")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist", help="folder for the files")
    folder: Path = parser.parse_args().folder.absolute()
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        copy_commit(source)
        project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
        name, version = project["name"], project["version"]
        changes = changes_of(version, (source / "CHANGELOG.md").read_text())
        folder.mkdir(parents=True, exist_ok=True)
        if left := sorted(path.name for path in folder.iterdir()):
            sys.exit(f"release: {folder} is not empty: {', '.join(left[:5])}. Remove it, or name another folder.")
        files = [build("wheel", source, folder), build("sdist", source, folder)]
        lock = (source / "installers" / "node.lock").read_text()
    bill, notes = folder / f"{name}-{version}.cdx.json", folder / "CHANGES.md"
    bill.write_text(json.dumps(bill_of_materials(project, lock, files[0]), indent=1) + "\n")
    notes.write_text(changes)
    sums = "".join(f"{sha256(path)}  {path.name}\n" for path in sorted([*files, bill, notes]))
    (folder / "SHA256SUMS").write_text(sums)
    print(f"{name} {version} in {folder}:\n{sums}", end="")


def copy_commit(target: Path) -> None:
    """Copy the files of the current commit."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryFile() as file:
        file.write(archive)
        file.seek(0)
        with tarfile.open(fileobj=file) as files:
            files.extractall(target, filter="data")


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build a wheel or an sdist with hatchling's fixed date, so that a checkout gives the same bytes."""
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    command = [sys.executable, "-P", "-c", BUILD.format(kind=kind), str(folder)]
    built = subprocess.run(command, cwd=source, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode != 0:
        sys.exit(f"release: the {kind} could not be built.")
    return folder / built.stdout.split()[-1]


def changes_of(version: str, changelog: str) -> str:
    """Return the section of a version; end if there is none."""
    found = re.search(rf"^## \[{re.escape(version)}\].*?(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        sys.exit(f"release: CHANGELOG.md has no section for {version}. Add '## [{version}] - YYYY-MM-DD'.")
    return found[0].strip() + "\n"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def bill_of_materials(project: dict[str, Any], lock: str, wheel: Path) -> dict[str, Any]:
    """Return the bill of materials in CycloneDX 1.6: the agent, and the packages that a node's environment locks."""
    digest = sha256(wheel)
    this = f"pkg:pypi/{project['name']}@{project['version']}"
    components = [locked(block) for block in re.split(r"\n(?=\S)", lock.strip())]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{this}#{digest}')}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": this,
                "name": project["name"],
                "version": project["version"],
                "description": project["description"],
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": this,
                "hashes": [{"alg": "SHA-256", "content": digest}],
            }
        },
        "components": components,
        "dependencies": [{"ref": this, "dependsOn": [one["bom-ref"] for one in components]}],
    }


def locked(block: str) -> dict[str, Any]:
    """Return the component of one package of a lock; a package may occur twice, for different systems."""
    found = re.match(r"([\w.-]+)==([^\s;\\]+)(?: *; *([^\\\n]+?))? *(?:\\|$)", block, re.MULTILINE)
    if found is None:
        sys.exit(f"release: this entry of node.lock is not understood: {block[:80]}")
    name, version, marker = found[1].lower(), found[2], found[3]
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "properties": [
            {"name": "lock:sha256", "value": digest} for digest in re.findall(r"--hash=sha256:([0-9a-f]{64})", block)
        ],
    }
    if marker:
        component["properties"].append({"name": "lock:marker", "value": marker})
    return component


if __name__ == "__main__":
    main()
