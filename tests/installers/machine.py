"""A machine for install.sh: a home of its own, few programs on its PATH, and no network."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.installers.small_agent import small_wheel

SCRIPT = Path(__file__).resolve().parents[2] / "installers" / "install.sh"
NEEDED = ("sh", "env", "uname", "id", "ldd", "grep", "sed", "tr", "head", "tail", "cut", "awk", "df", "dirname", "date")
TOOLS = (*NEEDED, "cat", "mkdir", "rmdir", "rm", "mv", "ln", "ls", "chmod", "readlink", "sleep", "mktemp")

UV = """
# As `uv venv --seed --python PYTHON TARGET`, in a moment and without a network: pip is the tests' own.
while [ $# -gt 1 ]; do [ "$1" != --python ] || python=$2; shift; done
"$python" -m venv --without-pip "$1" && ln -s '{pip}' "$1"/lib/python3.*/site-packages/
"""


def quick_uv() -> str:
    """Return a program named uv that makes an environment in a moment."""
    pip = find_spec("pip")
    assert pip is not None
    assert pip.origin is not None
    return UV.format(pip=Path(pip.origin).parent)


@dataclass
class Machine:
    """A home folder and what is on the PATH."""

    home: Path
    wheels: Path
    tools: Path

    @property
    def prefix(self) -> Path:
        return self.home / "echo"

    @property
    def program(self) -> Path:
        return self.home / "bin" / "swarm-node"

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """Nothing of the test's own but a temporary folder, and pip without a network."""
        return {
            "HOME": str(self.home), "PATH": str(self.tools), "PIP_NO_INDEX": "1", "TMPDIR": str(self.home)
        } | dict(more)  # fmt: skip

    def command(self, *options: str) -> list[str]:
        return self.bare_command("--find-links", str(self.wheels), *options)

    def bare_command(self, *options: str, script: Path = SCRIPT) -> list[str]:
        """Return the command without a folder of wheels."""
        return ["/bin/sh", str(script), "--prefix", str(self.prefix), "--bin", str(self.home / "bin"), *options]

    def run(self, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = self.command("--engine", "none", *options) if "--engine" not in options else self.command(*options)
        return subprocess.run(command, env=self.environment(more), capture_output=True, text=True, check=False)

    def version(self) -> str:
        return subprocess.run([self.program, "--version"], capture_output=True, text=True, check=True).stdout.strip()

    def versions(self) -> int:
        return len(list((self.prefix / "versions").iterdir()))

    def put(self, name: str, script: str) -> None:
        """Another program of that name on this machine."""
        tool = self.tools / name
        tool.unlink(missing_ok=True)
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)


def make_machine(folder: Path) -> Machine:
    """Make a machine in a folder, with version 1.0 to be had."""
    tools = folder / "tools"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, name
        (tools / name).symlink_to(found)
    (tools / "python3").symlink_to(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info[1]}")
    home = folder / "home"
    home.mkdir()
    small_wheel(folder / "wheels", "1.0")
    return Machine(home, folder / "wheels", tools)
