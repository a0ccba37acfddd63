"""Time from nothing to the first credit: a volunteer's wait, by stage, for a round that is already running.

- A real coordinator with its learner runs the demo's round; each lap is a node with a new home, by the shipped command.
- Stages are what the public leaderboard says of the node, looked at twenty times a second; it is half a second old.
- `install` is install.sh with the real packages and without an engine. A lap before fills pip's cache, so that what is
  counted is ours and not the network's. `QUICK=1` leaves it out.
"""

import json
import os
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


def install(folder: Path, wheels: Path) -> float:
    """Seconds of install.sh into an empty prefix."""
    began = time.monotonic()
    place = ["--prefix", str(folder / "prefix"), "--bin", str(folder / "bin"), "--find-links", str(wheels)]
    command = ["sh", str(ROOT / "installers" / "install.sh"), *place, "--engine", "none"]
    variables = {"HOME": str(folder), "PIP_CACHE_DIR": str(wheels.with_name("cache"))}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | variables)
    return time.monotonic() - began


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
            build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
            subprocess.run([sys.executable, "-P", "-c", build, str(folder / "dist")], cwd=ROOT, check=True)
            install(folder / "warm", folder / "dist")
            for number in range(laps):
                bench.measure("install", install(folder / f"lap-{number}", folder / "dist"), unit="s")
    bench.goal("from the command to the first credit within a minute", bench.median("first credit"), at_most=60.0)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
