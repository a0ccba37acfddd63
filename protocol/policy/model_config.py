"""Checks of a policy's config.json and tokenizer.json before any library reads them.

- config.json names no code: neither files of its own (`auto_map`) nor kernels to download and run (`…_implementation`).
- It has no more layers than there are tensors, and no more numbers than the files can hold: otherwise a few hundred
  bytes could fill a volunteer's memory before anybody notices that the weights are missing.
- tokenizer.json has no more bytes and added tokens than any published one needs. Its other costs are known only when it
  is used: an untrusted tokenizer is used only under limits of time and memory.
- Every error is a `ValueError`; the caller adds whose file it is.
"""

import json
from collections.abc import Iterator
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
