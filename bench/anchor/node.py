"""`swarm-node join` with the paced engine in the place of torch; everything else is the shipped node.

`python -m bench.anchor.node '--group-s 9 --at-once 2' JOIN_STRING OPTIONS …`
"""

import shlex
import sys

from swarm_node import cli
from swarm_node.engine import choose


def main() -> None:
    """Join with the engine that the first argument describes."""
    _, pace, *words = sys.argv
    command = [sys.executable, "-P", "-m", "bench.anchor.engine", *shlex.split(pace)]
    choose.ENGINES["torch"] = choose.ENGINES["torch"]._replace(command=lambda _options: command)
    sys.argv = ["swarm-node", "join", *words, "--engine", "torch"]
    cli.main()


if __name__ == "__main__":
    main()
