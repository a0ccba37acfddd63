"""A LoRA adapter beside the weights that it adapts: two files of a policy folder, in the format of peft.

    adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r, in] and …lora_B.weight [out, r]
    adapter_config.json         r, lora_alpha, and which modules are adapted

- The policy is the base with the adapter merged; nobody computes with anything else:

      W' = W + (lora_alpha / r) · B A      products and sums in float32, rounded to the type in which W is stored:
                                           to bfloat16 as in `protocol.policy.rounding`, else to the nearest

- W is always the file's, never the merged weights of an earlier version: no merge is undone, so no error adds up.
- Options that are not listed here (other scales, biases, ranks by module) would give other weights, and are rejected.
"""

import json
from collections.abc import Collection, Iterable
from typing import Any

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FILES = frozenset({WEIGHTS, CONFIG})

_PREFIX, _DOWN, _UP, _WEIGHT = "base_model.model.", ".lora_A.weight", ".lora_B.weight", ".weight"

RANK_MAX, ALPHA_MAX = 1024, 1e9

_AS_WE_READ_IT: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_rslora": (False,),
    "use_dora": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
}


def names(weight: str) -> tuple[str, str]:
    """Return the names of the two matrices of a policy weight: A, then B."""
    module = _PREFIX + weight.removesuffix(_WEIGHT)
    return module + _DOWN, module + _UP


def adapted(tensors: Iterable[str]) -> list[str]:
    """Return the weights that an adapter's tensors adapt; each must have both matrices, and there must be no others."""
    given = set(tensors)
    weights = sorted(name.removeprefix(_PREFIX).removesuffix(_DOWN) + _WEIGHT for name in given if name.endswith(_DOWN))
    if not weights or given != {name for weight in weights for name in names(weight)}:
        raise ValueError(f"{WEIGHTS} does not hold two matrices for each module")
    return weights


def config(rank: int, alpha: float, modules: Collection[str], base: str) -> bytes:
    """Return adapter_config.json for an adapter of `modules`; `base` is the name of the base model."""
    described = {name: values[0] for name, values in _AS_WE_READ_IT.items()}
    described |= {"r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "target_modules": sorted(modules)}
    described |= {"base_model_name_or_path": base, "task_type": "CAUSAL_LM", "inference_mode": True}
    return json.dumps(described, indent=2, sort_keys=True).encode()


def scale(data: bytes) -> float:
    """Return the factor of B A that adapter_config.json gives."""
    said = json.loads(data)
    if not isinstance(said, dict):
        raise ValueError(f"{CONFIG} is not a JSON object")
    for name, values in _AS_WE_READ_IT.items():
        if said.get(name, values[0]) not in values:
            raise ValueError(f"{CONFIG} has {name} = {str(said[name])[:50]}, which is not supported")
    rank, alpha = said.get("r"), said.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= RANK_MAX:
        raise ValueError(f"{CONFIG} has no valid rank (r)")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < ALPHA_MAX:
        raise ValueError(f"{CONFIG} has no valid lora_alpha")
    return float(alpha) / rank
