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
from swarm_node.engine.vllm.command import JOINED

HEADS = ("num_attention_heads", "n_head", "n_heads")
"""The names of the number of attention heads in the config.json of different architectures."""

WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
"""Further sizes that vLLM divides by the number of cards."""


def splits(config: Mapping[str, Any]) -> list[int]:
    """Return the numbers of cards over which vLLM can split the model; none if its heads are not known.

    Each card has as many attention heads; of fewer key-value heads than cards, each card has a copy of one.
    """
    text = config.get("text_config")
    values = {**config, **(text if isinstance(text, Mapping) else {})}
    sizes = {name: value for name, value in values.items() if isinstance(value, int) and value > 0}
    heads = next((sizes[name] for name in HEADS if name in sizes), 0)
    if not heads:
        return []
    shared = sizes.get("num_key_value_heads", heads)
    wholes = [heads, *(sizes[name] for name in WIDTHS if name in sizes)]
    return [
        cards
        for cards in JOINED
        if not any(whole % cards for whole in wholes) and (shared % cards == 0 or cards % shared == 0)
    ]


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the type of the weights, and what each engine makes of the architecture.

    `refused` says why engines cannot sample it, `halved` names those that compute float32 in half precision, and
    `splits` are the numbers of cards over which vLLM can split it.
    """
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
    return {"dtype": str(dtype), "refused": refused, "halved": halved, "splits": splits(config)}


def main() -> int:
    """Describe the configuration on stdin; return exit code 1 if it is invalid."""
    try:
        config = json.loads(sys.stdin.buffer.read(limits.POLICY_CONFIG_MAX_BYTES))
        print(json.dumps(describe(config)))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        print(f"not a configuration: {error!r}"[:300], file=sys.stderr)
        return 1
    return 0
