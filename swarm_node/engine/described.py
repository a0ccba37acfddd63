"""The engine child that describes a model: config.json on standard input, one line of JSON on standard output.

- The agent never parses a policy's own files. It runs this child before it registers, with a time limit.
- A configuration that cannot be read is described as unknown: then the model is judged by its size alone.
"""

import json
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from protocol import limits
from protocol.errors import EngineFailed
from protocol.policy import architectures


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the type of the weights, why engines cannot sample them, and which compute float32 in half precision."""
    every, refused, halved = architectures.reason_to_refuse(config), dict[str, str](), list[str]()
    if every:
        refused = dict.fromkeys(("vllm", "llama", "torch"), every)
    elif find_spec("gguf"):
        from swarm_node.engine.llama.recipes import recipe_of

        try:
            recipe, _ = recipe_of(config)
            halved = [] if recipe.is_exact else ["llama"]
        except EngineFailed as error:
            refused["llama"] = error.message.rstrip(".")
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return {"dtype": str(dtype), "refused": refused, "halved": halved}


def main() -> int:
    """Describe the configuration on stdin; return exit code 1 if it is invalid."""
    try:
        config = json.loads(sys.stdin.buffer.read(limits.POLICY_CONFIG_MAX_BYTES))
        print(json.dumps(describe(config)))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        print(f"not a configuration: {error!r}"[:300], file=sys.stderr)
        return 1
    return 0
