"""What a policy's config.json may say to those who build a model of it, looked at before any library sees it.

- It names no code: neither files of its own (`auto_map`) nor kernels to be fetched and run (`…_implementation`).
- It promises no more layers than there are tensors, and no larger ones than the files bear out: a few hundred bytes
  would else fill a volunteer's memory before anybody finds that nothing is behind them.
- Its tokenizer.json has no more bytes and added tokens than any published one needs. What else a tokenizer can cost is
  known only when it is used: who uses a stranger's does so under limits of time and memory.
- Whatever is wrong is a `ValueError`; whoever reads the file says whose it is.
"""

import json
from collections.abc import Iterator
from typing import Any

from protocol import limits

OURS = frozenset({None, "eager", "sdpa", "batched_mm", "grouped_mm"})
"""Ways to compute that every installation has; any other may be a package's, or a place to fetch one from."""

LAYERS = frozenset(
    {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"}
)
"""How configurations call the number of modules that stand behind each other."""

PARAMETERS_PER_BYTE = 2
"""At the most: four bits each, in the smallest form in which weights are published."""


def require_plain(config: dict[str, Any]) -> None:
    """Refuse a configuration that names code."""
    for name, value in _members(config):
        if name == "auto_map" or (name.endswith("_implementation") and not _is_ours(value)):
            raise ValueError(f"config.json names code to run ({name[:60]})")


def require_layers(config: dict[str, Any], tensors: int) -> None:
    """Refuse a configuration of more layers than there are tensors for them."""
    for name, value in _members(config):
        if name in LAYERS and isinstance(value, int) and value > tensors:
            raise ValueError(f"config.json promises {value} layers, and there are {tensors} tensors")


def require_borne_out(parameters: int, size_bytes: int) -> None:
    """Refuse a model of more numbers than files of this size can hold."""
    if parameters > PARAMETERS_PER_BYTE * size_bytes:
        raise ValueError(f"config.json promises {parameters} numbers, and the tensors have {size_bytes} bytes")


def require_tokenizer(data: bytes) -> None:
    """Refuse a tokenizer.json that is larger, or adds more tokens, than any published one."""
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
    """Whether this is a way to compute, or one for each part of the model, that needs nothing more."""
    ways = way.values() if isinstance(way, dict) else [way]
    return all(isinstance(one, str | None) and one in OURS for one in ways)


def _members(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every member of an object and of those within it: a configuration may hold others."""
    left: list[Any] = [config]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield from value.items()
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
