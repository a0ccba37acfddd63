"""Architectures that cannot be trained and sampled rightly, by what config.json says of a policy; read without torch.

- The coordinator asks before a round's keys are made, an engine before it builds a model: both give the same reason.
- Every other architecture is tried: learner, engine and auditor each compare what they compute with what the model says
  of one sequence at a time, and refuse what differs. `docs/architectures.md` lists what they found.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

NO_CACHE = "transformers keeps no cache of it that rows can be chosen from"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "falcon_mamba": NO_CACHE,
        "kimi_linear": NO_CACHE,
        "mamba": NO_CACHE,
        "mamba2": NO_CACHE,
        "minimax": "what it says of a sequence depends on the padding beside it",
        "nemotron_h": "transformers computes a token alone otherwise than within a text",
        "recurrent_gemma": NO_CACHE,
        "rwkv": NO_CACHE,
        "xlstm": NO_CACHE,
    }
)
"""Model types, each with the reason."""


def reason_to_refuse(config: Mapping[str, Any]) -> str:
    """Return why a policy with this config.json cannot be used; nothing if no reason is known."""
    kind = str(config.get("model_type", ""))
    if kind in REFUSED:
        return f"the architecture {kind} is not supported: {REFUSED[kind]}"
    if config.get("is_encoder_decoder"):
        return f"the architecture {kind} has an encoder, and only decoders are supported"
    if isinstance(quantization := config.get("quantization_config"), Mapping):
        method = quantization.get("quant_method", "unknown")
        return f"its weights are quantized ({method}), and only float32, bfloat16 and float16 are supported"
    return ""
