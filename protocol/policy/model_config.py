"""A policy's config.json and tokenizer.json, checked before any library reads them; and architectures that do not work.

- config.json names no code: neither files of its own (`auto_map`) nor kernels to download and run (`…_implementation`).
- It has no more layers than there are tensors, and no more numbers than the files can hold: otherwise a few hundred
  bytes could fill a volunteer's memory before anybody notices that the weights are missing.
- tokenizer.json has no more bytes and added tokens than any published one needs. Its other costs are known only when it
  is used: an untrusted tokenizer is used only under limits of time and memory.
- Every error is a `ValueError`; the caller adds whose file it is.
- The coordinator checks the architecture before it makes a round's keys, an engine before it builds a model: both give
  the same reason. Every other architecture is tried: learner, engine and auditor each compare their batched results
  with those of the model for one sequence at a time, and reject differences. `docs/architectures.md` lists the results.
"""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from protocol import limits

OURS = frozenset({None, "eager", "sdpa", "batched_mm", "grouped_mm"})
"""Implementations that every installation has; any other may belong to a package or name a download."""

LAYERS = frozenset(
    {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"}
)
"""Names of the number of layers in configurations."""

PARAMETERS_PER_BYTE = 2
"""The most parameters per byte: four bits each, the smallest form in which weights are published."""


def require_plain(config: dict[str, Any]) -> None:
    """Reject a configuration that names code."""
    for name, value in _members(config):
        if name == "auto_map" or (name.endswith("_implementation") and not _is_ours(value)):
            raise ValueError(f"config.json names code to run ({name[:60]})")


def require_layers(config: dict[str, Any], tensors: int) -> None:
    """Reject a configuration with more layers than there are tensors."""
    for name, value in _members(config):
        if name in LAYERS and isinstance(value, int) and value > tensors:
            raise ValueError(f"config.json has {value} layers, but there are {tensors} tensors")


def require_borne_out(parameters: int, size_bytes: int) -> None:
    """Reject a model with more parameters than files of this size can hold."""
    if parameters > PARAMETERS_PER_BYTE * size_bytes:
        raise ValueError(f"config.json has {parameters} parameters, but the tensors have {size_bytes} bytes")


def require_tokenizer(data: bytes) -> None:
    """Reject a tokenizer.json that is larger, or adds more tokens, than any published one."""
    if len(data) > limits.TOKENIZER_MAX_BYTES:
        raise ValueError(f"tokenizer.json has {len(data)} bytes, and {limits.TOKENIZER_MAX_BYTES} are allowed")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("tokenizer.json is nested too deeply") from None
    added = value.get("added_tokens") if isinstance(value, dict) else None
    if isinstance(added, list) and len(added) > limits.ADDED_TOKENS_MAX:
        raise ValueError(f"tokenizer.json adds {len(added)} tokens, and {limits.ADDED_TOKENS_MAX} are allowed")


def _is_ours(way: Any) -> bool:
    """Return True if this implementation, or each one of a dict by part of the model, is in `OURS`."""
    ways = way.values() if isinstance(way, dict) else [way]
    return all(isinstance(name, str | None) and name in OURS for name in ways)


def _members(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every member of an object and of the objects within it: configurations may be nested."""
    left: list[Any] = [config]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield from value.items()
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)


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
