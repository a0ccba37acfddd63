"""A support bundle: a zip file with the data that a helper needs, and without data that identifies its owner.

- It contains only the listed items, never whole folders: no key, no log of other programs, no policy.
- Every text goes through `redact`, including the names and versions of programs.
"""

import json
import platform
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from swarm_node.allowance import settings
from swarm_node.coordinator_api.join_string import JoinString
from swarm_node.doctor.redact import known_names, redact
from swarm_node.doctor.report import CheckResult
from swarm_node.owner import stopped

PACKAGES = (
    "echo-swarm",
    "libp2p",
    "trio",
    "httpx",
    "tuf",
    "torch",
    "transformers",
    "llama-cpp-python",
    "gguf",
    "numpy",
)


def write(target: Path, home: Path, findings: list[CheckResult], *, join: JoinString | None = None) -> None:
    """Write the bundle to a new file."""
    secrets = known_names(home, join.url if join else "")
    texts = {
        "findings.json": json.dumps([finding.to_json() for finding in findings], indent=1, ensure_ascii=False),
        "system.json": json.dumps(_system(), indent=1, ensure_ascii=False),
        "stopped.json": json.dumps(stopped.last(home), indent=1, ensure_ascii=False),
        "limits.toml": _text(home / settings.FILE),
        "README.txt": "Made by `swarm-node doctor --bundle`. Keys, addresses, names and paths were taken out.\n",
    }
    with zipfile.ZipFile(target, "x", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in texts.items():
            bundle.writestr(name, redact(text, secrets))


def _system() -> dict[str, object]:
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
