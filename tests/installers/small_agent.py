"""A wheel named echo-swarm that stands on nothing: what install.sh does is the same, in seconds and without a network.

`make test-install` installs the real one, into a bare Debian.
"""

import hashlib
import io
import tarfile
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: echo-swarm\nVersion: {version}\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
PROGRAM = """
import signal
import sys

def join():
    ends = {{signal.SIGINT, signal.SIGTERM}}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    print("{version} at work", flush=True)
    print("{version} left by", signal.Signals(signal.sigwait(ends)).name, flush=True)

def main():
    if sys.argv[1:2] in (["join"], ["mirror"]):
        return join()
    print("echo-swarm {version}" if sys.argv[1:] == ["--version"] else " ".join(sys.argv[1:]))
    sys.exit({exit_code})
"""


def small_wheel(
    folder: Path, version: str, *, exit_code: int = 0, uv_lock: str = "# nothing\n", node_lock: str = "# nothing\n"
) -> Path:
    """Write a wheel of that version, whose program ends with that code."""
    root = Path(__file__).resolve().parents[2]
    info = f"echo_swarm-{version}.dist-info"
    files = {
        "swarm_node/__init__.py": "",
        "swarm_node/cli.py": PROGRAM.format(version=version, exit_code=exit_code),
        "swarm_node/p2p/__init__.py": "",
        "swarm_node/p2p/host.py": "",
        "swarm_node/installation/node.lock": node_lock,
        "swarm_node/installation/constraints.txt": "",
        "swarm_node/installation/uv.lock": uv_lock,
        f"{info}/METADATA": METADATA.format(version=version),
        f"{info}/WHEEL": WHEEL,
        f"{info}/entry_points.txt": "[console_scripts]\nswarm-node = swarm_node.cli:main\n",
    } | {
        f"swarm_node/installation/{name}": (root / "installers" / name).read_text()
        for name in ("launchd.plist", "system.service", "user.service")
    }
    return _wheel(folder / f"echo_swarm-{version}-py3-none-any.whl", info, files)


UV = """#!/bin/sh
echo "$*" >"$HOME/uv-arguments"
env | grep -E '^(UV_|SSL_)' >"$HOME/uv-variables"
[ -z "$FAKE_UV_FAILS" ] || exit 1
words=$*
while [ "$1" != --python ]; do shift; done
case $words in
  *.whl) exec "$2" -m pip install --no-deps "${words##* }" ;;
  *.lock) exit ;;
esac
site=$(echo "${2%/bin/python}"/lib/python3.*/site-packages)
printf 'class version: cuda, hip = %s, %s\\n' "${FAKE_CUDA:-None}" "${FAKE_HIP:-None}" >"$site/torch.py"
: >"$site/transformers.py"
"""
"""A program named uv: it installs a wheel by pip, nothing of a list, and for torch a file that says its build."""


def small_uv(folder: Path) -> str:
    """Write a wheel of a program named uv, which records its arguments and variables; return its lock."""
    info = "uv-0.1.dist-info"
    files = {
        "uv-0.1.data/scripts/uv": UV,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: uv\nVersion: 0.1\n",
        f"{info}/WHEEL": WHEEL,
    }
    wheel = _wheel(folder / "uv-0.1-py3-none-any.whl", info, files)
    return f"uv==0.1 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


SOURCE_PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
SOURCE_BACKEND = """
import shutil, subprocess, sys

def build_wheel(folder, config_settings=None, metadata_directory=None):
    subprocess.run([sys.executable, "-c", "import beside"], check=True)
    return shutil.copy("built-0.1-py3-none-any.whl", folder).rpartition("/")[2]
"""
"""Imports a module of its own folder, as the setup.py of python-baseconv does."""


def small_source(folder: Path) -> str:
    """Write a package that pip has to build; return its lock."""
    info = "built-0.1.dist-info"
    metadata = "Metadata-Version: 2.1\nName: built\nVersion: 0.1\n"
    wheel = _wheel(
        folder / "parts" / "built-0.1-py3-none-any.whl", info, {f"{info}/METADATA": metadata, f"{info}/WHEEL": WHEEL}
    )
    source = folder / "built-0.1.tar.gz"
    texts = {"PKG-INFO": metadata, "pyproject.toml": SOURCE_PROJECT, "backend.py": SOURCE_BACKEND, "beside.py": ""}
    with tarfile.open(source, "w:gz") as archive:
        archive.add(wheel, f"built-0.1/{wheel.name}")
        for name, text in texts.items():
            member = tarfile.TarInfo(f"built-0.1/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return f"built==0.1 --hash=sha256:{hashlib.sha256(source.read_bytes()).hexdigest()}\n"


def _wheel(wheel: Path, info: str, files: dict[str, str]) -> Path:
    record = f"{info}/RECORD"
    lines = [f"{name},sha256={_hash(text)},{len(text.encode())}" for name, text in files.items()]
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (files | {record: "\n".join([*lines, f"{record},,", ""])}).items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100755 if "/scripts/" in name else 0o100644) << 16
            archive.writestr(entry, text)
    return wheel


def _hash(text: str) -> str:
    return urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "echo-swarm"
version = "{version}"
"""
BACKEND = """
import shutil

def build_wheel(folder, config_settings=None, metadata_directory=None):
    return shutil.copy({wheel!r}, folder).rpartition("/")[2]
"""


def small_checkout(folder: Path, version: str) -> Path:
    """Write a checkout whose build gives the small wheel of that version; return its install.sh."""
    installers = folder / "installers"
    installers.mkdir(parents=True)
    wheel = small_wheel(folder / "built", version)
    (folder / "pyproject.toml").write_text(PROJECT.format(version=version))
    (folder / "backend.py").write_text(BACKEND.format(wheel=str(wheel)))
    (installers / "build.lock").write_text("# nothing\n")
    script = installers / "install.sh"
    script.write_text((Path(__file__).resolve().parents[2] / "installers" / "install.sh").read_text())
    return script
