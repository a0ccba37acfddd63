"""Node, and packages of npm by a lock file, for a test that needs them: in a copy outside the tree, or skipped."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NODE_MAJOR_MIN = 20
PATIENCE_S = 300
UNREACHABLE = (
    r"E(AI_AGAIN|CONNREFUSED|CONNRESET|HOSTUNREACH|NETUNREACH|NOTFOUND|TIMEDOUT|403|407|5\d\d)|ERR_SOCKET_TIMEOUT"
)


def require_node(*others: str) -> None:
    """Skip where Node or a program that comes with it is missing or too old."""
    if missing := [program for program in ("node", *others) if not shutil.which(program)]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < NODE_MAJOR_MIN:
        pytest.skip(f"node is {version}; {NODE_MAJOR_MIN} or newer is needed")


def install(source: Path, folder: Path) -> Path:
    """The copied folder with its packages beside it."""
    require_node("npm")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("node_modules"))
    command = "npm ci --ignore-scripts --no-audit --no-fund --prefer-offline --fetch-retries=0 --fetch-timeout=20000"
    installed = subprocess.run(command.split(), cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    if unreachable := re.search(rf"^npm \S+ code ({UNREACHABLE})$", installed.stderr, re.MULTILINE):
        pytest.skip(f"npm's registry cannot be reached ({unreachable[1]})")
    assert installed.returncode == 0, installed.stderr
    return folder
