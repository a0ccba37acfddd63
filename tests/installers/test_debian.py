"""The real wheel in a bare Debian, by install.sh, without a compiler: `make test-install`, by root.

- It joins nothing; it shows that what a volunteer types ends in a program that starts, with an engine that loads.
- The system is the one whose mirror apt uses here, fetched once and copied for each run.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "python3,python3-venv,ca-certificates"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

pytestmark = pytest.mark.skipif(
    "ECHO_SWARM_DEBIAN" not in os.environ, reason="make test-install: debootstrap, root and a network"
)


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A minimal system with our wheel, script and checkout in /swarm, and with this machine's way to the index."""
    root = tmp_path_factory.mktemp("debian") / "root"
    prepared = os.environ["ECHO_SWARM_DEBIAN"]
    if Path(prepared, "bin").is_dir():
        subprocess.run(["cp", "-a", prepared, root], check=True)
    else:
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", root], check=True)
    swarm = root / "swarm"
    swarm.mkdir()
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-P", "-c", build, str(swarm)], cwd=ROOT, check=True)
    shutil.copy(ROOT / "installers" / "install.sh", swarm)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    archive = subprocess.run(
        ["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=files, capture_output=True, check=True
    ).stdout
    (swarm / "checkout").mkdir()
    subprocess.run(["tar", "-x", "-C", swarm / "checkout"], input=archive, check=True)
    if CERTIFICATES.exists():
        shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    yield root
    shutil.rmtree(root)


def inside(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command there, with pip's configuration of here and little else."""
    kept = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy") or name == "PIP_CERT"}
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return subprocess.run(
        ["chroot", root, *command],
        env={"PATH": path, "HOME": "/root", **kept},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_bare_debian_gets_a_node_without_a_compiler(debian: Path) -> None:
    assert inside(debian, "sh", "-c", "command -v cc gcc c++").returncode != 0
    dry = inside(debian, "sh", "/swarm/install.sh", "--find-links", "/swarm", "--engine", "none", "--dry-run")
    assert "nothing was changed" in dry.stdout, dry.stderr
    install = inside(debian, "sh", "/swarm/install.sh", "--find-links", "/swarm", "--engine", "none")
    assert install.returncode == 0, install.stdout + install.stderr
    assert "swarm-node join" in install.stdout
    assert inside(debian, "swarm-node", "--version").stdout.startswith("echo-swarm ")
    gone = inside(debian, "sh", "/swarm/install.sh", "--uninstall")
    assert gone.returncode == 0, gone.stderr
    assert inside(debian, "sh", "-c", "command -v swarm-node").returncode != 0


def test_a_checkout_is_enough_on_a_bare_debian(debian: Path) -> None:
    """One command, with `python3` and without `python`."""
    assert inside(debian, "sh", "-c", "command -v python").returncode != 0
    install = inside(debian, "sh", "/swarm/checkout/installers/install.sh", "--engine", "none")
    assert install.returncode == 0, install.stdout + install.stderr
    assert inside(debian, "swarm-node", "--version").stdout.startswith("echo-swarm ")
    assert inside(debian, "sh", "/swarm/install.sh", "--uninstall").returncode == 0
