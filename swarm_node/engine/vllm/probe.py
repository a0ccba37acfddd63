"""Program under vLLM's interpreter: imports the modules of the engine child, and prints the result as JSON."""

import json
import os
from collections.abc import Sequence

from swarm_node.engine.vllm.command import environment


def main(_arguments: Sequence[str]) -> None:
    """Fail as the child would, or print vLLM's version and device."""
    os.environ.update(environment(threads=1))
    import vllm
    from vllm.platforms import current_platform

    from swarm_node.engine.vllm import engine, worker  # noqa: F401  # checks that they import

    device = current_platform.device_type
    fp8 = device != "cuda" or current_platform.has_device_capability(89)
    print(json.dumps({"version": vllm.__version__, "device": device, "fp8": bool(fp8)}))
