"""Properties of a policy by its config.json, read without torch: architectures that do not work, and positions.

- The coordinator checks before it makes a round's keys, an engine before it builds a model: both give the same reason.
- Every other architecture is tried: learner, engine and auditor each compare their batched results with those of the
  model for one sequence at a time, and reject differences. `docs/architectures.md` lists the results.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

NO_CACHE = "its transformers cache cannot select rows"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "falcon_mamba": NO_CACHE,
        "kimi_linear": NO_CACHE,
        "mamba": NO_CACHE,
        "mamba2": NO_CACHE,
        "minimax": "its results for a sequence depend on the padding",
        "nemotron_h": "transformers computes a single token differently from the same token in a text",
        "recurrent_gemma": NO_CACHE,
        "rwkv": NO_CACHE,
        "xlstm": NO_CACHE,
    }
)
"""Model types, each with the reason."""

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""The names of the greatest number of tokens in a text, in the config.json of different architectures."""


def reason_to_refuse(config: Mapping[str, Any]) -> str:
    """Return why a policy with this config.json cannot be used; empty if no reason is known."""
    kind = str(config.get("model_type", ""))
    if kind in REFUSED:
        return f"the architecture {kind} is not supported: {REFUSED[kind]}"
    if config.get("is_encoder_decoder"):
        return f"the architecture {kind} has an encoder, and only decoders are supported"
    if isinstance(quantization := config.get("quantization_config"), Mapping):
        method = quantization.get("quant_method", "unknown")
        return f"its weights are quantized ({method}), and only float32, bfloat16 and float16 are supported"
    return ""


def positions_of(config: Mapping[str, Any]) -> int:
    """Return the most tokens of a text, by the policy's config.json; 0 if it states none."""
    text = config.get("text_config")
    for values in (config, text if isinstance(text, Mapping) else {}):
        for name in POSITIONS:
            value = values.get(name)
            if isinstance(value, int) and value > 0:
                return value
    return 0
