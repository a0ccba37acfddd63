"""Run under vLLM's interpreter: imports what the engine child needs, and prints what was found as a line of JSON."""

import json
import os
from collections.abc import Sequence

from swarm_node.engine.vllm.command import environment


def main(_arguments: Sequence[str]) -> None:
    """Fail as the child would, or say which vLLM this is."""
    os.environ.update(environment(threads=1))
    import vllm
    from vllm.platforms import current_platform

    from swarm_node.engine.vllm import engine, worker  # noqa: F401  # whether they import

    print(json.dumps({"version": vllm.__version__, "device": current_platform.device_type}))
