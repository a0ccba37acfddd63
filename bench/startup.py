"""CPU time of commands that only read and ask, against that of `import typer`, which every command needs.

- A real coordinator with the demo's round answers; a node has worked in it before, and its home names the round.
- Each command is measured in turns with `import typer`, in CPU seconds of all its processes: other programs on the
  machine disturb these less than seconds on the clock. `QUICK=1` has one round of turns.
- The modules are compiled before, as an installation does.
"""

import compileall
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.first_join import ROOT, join_until_credited, round_at_work
from bench.harness import Bench, no_options, quick_from_environment
from coordinator.base.children import script

BASE = "import typer"
RATIO_MAX = 4.0
"""`import typer` takes 0.12 s on a quiet machine of ours, and half a second is not felt as a wait."""


def cpu_s(*command: str) -> float:
    """CPU seconds of a command and of its children; it must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    no_options(__doc__)
    rounds = 1 if quick_from_environment() else 5
    bench = Bench("startup", inputs={"rounds": rounds, "round": "examples/demo.toml"})
    for package in ("protocol", "ledger", "coordinator", "swarm_node"):
        compileall.compile_dir(ROOT / package, quiet=1)
    with tempfile.TemporaryDirectory(prefix="startup-") as name:
        folder = Path(name)
        with round_at_work(folder) as (url, join):
            join_until_credited(folder, url, join, 0)
            os.environ["SWARM_HOME"] = str(folder / "newcomer-0")
            settings = (str(ROOT / "examples" / "demo.toml"), "--set", f"round.directory={folder / 'round'}")
            figures = ("--train-s", "60", "--group-s", "55", "--broadcast-s", "20")
            commands = {
                "swarm-node": ("swarm-node",),
                "swarm-node limits": ("swarm-node", "limits"),
                "swarm-node earnings": ("swarm-node", "earnings"),
                "swarm-node why": ("swarm-node", "why"),
                "swarm-coordinator status": ("swarm-coordinator", "status", *settings),
                "swarm-coordinator plan": ("swarm-coordinator", "plan", *settings, *figures),
                "swarm-coordinator config check": ("swarm-coordinator", "config", "check", *settings),
            }
            for _ in range(rounds):
                bench.measure(BASE, cpu_s(sys.executable, "-P", "-c", BASE), unit="s")
                for case, (program, *words) in commands.items():
                    bench.measure(case, cpu_s(script(program), *words), unit="s")
    for case in commands:
        bench.goal(
            f"{case} is no more than {RATIO_MAX:g} imports of typer",
            bench.ratio(f"{case} ÷ {BASE}", case, BASE),
            at_most=RATIO_MAX,
        )
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
