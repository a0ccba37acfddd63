"""Time from nothing to the first credit: a volunteer's wait, by stage, for a round that is already running.

- A real coordinator with its learner runs the demo's round; each lap is a node with a new home, by the shipped command.
- Stages are what the public leaderboard says of the node, looked at twenty times a second; it is half a second old.
- The proof is a bare Debian (debootstrap, root and a network) with a new user, an empty home and a checkout. The first
  command is the README's; the next one is what the installer prints after "Next:", with the join string for HOST. The
  commands up to the first credit are counted, and the time of both from the second lap on, when the packages are in the
  caches of pip and uv: what is counted is then ours and not the network's. `ECHO_SWARM_DEBIAN`
  names a prepared system. `QUICK=1` leaves it out.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import Bench, no_options, quick_from_environment
from coordinator.base.children import script

ROOT = Path(__file__).resolve().parents[1]
LOOK_S = 0.05
"""The time between two looks at programs that tell nobody how far they are; far below a stage's seconds."""

PATIENCE_S = 300.0
USER = 1000
HOME, CHECKOUT = "home/newcomer", "srv/echo-swarm"
PACKAGES = "python3,python3-venv,ca-certificates"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

INSTALL, JOIN = "sh installers/install.sh", "swarm-node join"
WHOLE = "both commands, packages cached"

STAGES = ("registered", "policy held", "first credit")


def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


@contextmanager
def running(*command: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that is told to end, and waited for."""
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


@contextmanager
def round_at_work(folder: Path) -> Iterator[tuple[str, str]]:
    """The demo's round with a version out: its URL and join string."""
    listen = address()
    settings = [f"round.directory={folder / 'round'}", f"round.listen={listen}", f"round.seeder={address()}"]
    chosen = [part for setting in settings for part in ("--set", setting)]
    demo = str(ROOT / "examples" / "demo.toml")
    with running(script("swarm-coordinator"), "launch", demo, *chosen, log=folder / "coordinator.log") as process:
        assert process.stdout is not None
        join = next(line.rpartition(" ")[2].strip() for line in process.stdout if "swarm-node join " in line)
        until(lambda: read(f"http://{listen}/v1/status")["version"] >= 1, "the first version")
        yield f"http://{listen}", join


def until(look: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        if time.monotonic() > deadline:
            sys.exit(f"waited {PATIENCE_S:g} s for {what}")
        time.sleep(LOOK_S)  # the page tells nobody of what changes


def join_until_credited(folder: Path, url: str, join: str, number: int) -> dict[str, float]:
    """Seconds from the command to each stage."""
    name = f"newcomer-{number}"
    reached: dict[str, float] = {}
    began = time.monotonic()
    command = [script("swarm-node"), "join", join, "--home", str(folder / name), "--name", name]

    def look() -> bool:
        for row in read(f"{url}/v1/leaderboard")["nodes"]:
            if row["name"] == name:
                held = (True, row["version"] > 0, row["pending_micros"] + row["posted_micros"] > 0)
                for stage, there in zip(STAGES, held, strict=True):
                    if there:
                        reached.setdefault(stage, time.monotonic() - began)
        return len(reached) == len(STAGES)

    with running(*command, log=folder / f"{name}.log"):
        until(look, f"{name}'s first credit")
    return reached


@contextmanager
def bare_debian(folder: Path) -> Iterator[Path]:
    """A minimal system with a checkout and a user without files, and with this machine's way to the packages."""
    root, prepared = folder / "debian", os.environ.get("ECHO_SWARM_DEBIAN", "")
    if Path(prepared, "bin").is_dir():
        subprocess.run(["cp", "-a", "--one-file-system", prepared, root], check=True)
    else:
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", root], check=True)
    checkout = root / CHECKOUT
    checkout.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", checkout], input=archive, check=True)
    for file in (Path("/etc/resolv.conf"), CERTIFICATES, *map(Path, os.environ.get("PIP_FIND_LINKS", "").split())):
        if file.exists():
            place = root / file.relative_to("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-rL", "-T", file, place], check=True)
    home = root / HOME
    home.mkdir(parents=True)
    os.chown(home, USER, USER)
    subprocess.run(["mount", "-t", "proc", "proc", root / "proc"], check=True)
    try:
        yield root
    finally:
        subprocess.run(["umount", root / "proc"], check=True)


def inside(root: Path, words: str) -> list[str]:
    """Return the command that runs a line of a shell as the user, in the checkout."""
    kept = [f"{name}={value}" for name, value in os.environ.items() if name.lower().endswith("_proxy")]
    kept += [f"{name}={os.environ[name]}" for name in ("PIP_CERT", "PIP_FIND_LINKS") if name in os.environ]
    bare = ["env", "-i", f"HOME=/{HOME}", "PATH=/usr/local/bin:/usr/bin:/bin", *kept]
    return ["chroot", f"--userspec={USER}:{USER}", str(root), *bare, "sh", "-c", f"cd /{CHECKOUT} && exec {words}"]


def first_hour(folder: Path, root: Path, url: str, join: str) -> dict[str, float]:
    """Seconds of each command from an empty home to the first credit; caches are kept."""
    for name in (".local", ".config"):
        shutil.rmtree(root / HOME / name, ignore_errors=True)
    before = {row["node_id"] for row in read(f"{url}/v1/leaderboard")["nodes"]}
    taken: dict[str, float] = {}
    began = time.monotonic()
    done = subprocess.run(inside(root, INSTALL), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{INSTALL}: {done.stdout}{done.stderr}")
    taken[INSTALL] = time.monotonic() - began
    printed = next(line.partition("Next:")[2].strip() for line in done.stdout.splitlines() if "Next:" in line)

    def look() -> bool:
        rows = read(f"{url}/v1/leaderboard")["nodes"]
        return any(row["pending_micros"] + row["posted_micros"] > 0 for row in rows if row["node_id"] not in before)

    began = time.monotonic()
    with running(*inside(root, printed.replace("HOST", f"'{join}'")), log=folder / "debian.log"):
        until(look, "the first credit in the bare Debian")
        taken[JOIN] = time.monotonic() - began
    return taken


def main() -> int:
    no_options(__doc__)
    quick = quick_from_environment()
    laps = 1 if quick else 3
    bench = Bench("first_join", inputs={"laps": laps, "round": "examples/demo.toml"})
    with tempfile.TemporaryDirectory(prefix="first-join-") as name:
        folder = Path(name)
        with round_at_work(folder) as (url, join):
            for number in range(laps):
                for stage, seconds in join_until_credited(folder, url, join, number).items():
                    bench.measure(stage, seconds, unit="s")
            if not quick:
                with bare_debian(folder) as root:
                    taken: dict[str, float] = {}
                    for name, seconds in first_hour(folder, root, url, join).items():
                        bench.measure(f"{name}, with the download", seconds, unit="s")
                    for _ in range(laps):
                        taken = first_hour(folder, root, url, join)
                        for name, seconds in taken.items():
                            bench.measure(name, seconds, unit="s")
                        bench.measure(WHOLE, sum(taken.values()), unit="s")
                bench.goal("commands from an empty home to the first credit", float(len(taken)), at_most=3.0)
                bench.goal("our own time from an empty home to the first credit", bench.median(WHOLE), at_most=60.0)
    bench.goal("from the command to the first credit within a minute", bench.median("first credit"), at_most=60.0)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
