"""Sizes of a Qwen3, Qwen2 or Llama by its config.json, and whether our decoder supports it; read without torch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelFamily:
    """Differences of one family of models from the others, and transformers' defaults for missing sizes."""

    normed: bool
    """Each query and key is normalized."""
    biased: bool
    """Queries, keys and values have a bias."""
    kv_heads: int | None
    """None: as many as heads."""
    head: int | None
    """None: the hidden size divided by the heads."""


FAMILIES = {
    "qwen3": ModelFamily(normed=True, biased=False, kv_heads=32, head=128),
    "qwen2": ModelFamily(normed=False, biased=True, kv_heads=32, head=None),
    "llama": ModelFamily(normed=False, biased=False, kv_heads=None, head=None),
}
"""The traits of each `model_type`."""


def supports(config: dict[str, Any]) -> bool:
    """Return True for a model of these families without special features."""
    return (
        config.get("model_type") in FAMILIES
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("attention_bias")
        and not config.get("mlp_bias")
        and not config.get("use_sliding_window")
        and set(config.get("layer_types") or ()) <= {"full_attention"}
        and not config.get("quantization_config")
        and config.get("partial_rotary_factor") is None
        and _rope(config).keys() <= {"rope_type", "type", "rope_theta"}
        and all(_rope(config).get(name, "default") == "default" for name in ("rope_type", "type"))
    )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of config.json; the old form takes precedence over the new one, as in transformers."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; missing values in config.json get transformers' defaults."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int
    epsilon: float
    rope_base: float
    tied: bool
    normed: bool
    biased: bool

    @staticmethod
    def from_config(config: dict[str, Any]) -> "ModelShape":
        family = FAMILIES[config["model_type"]]
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return ModelShape(
            vocabulary=int(config["vocab_size"]),
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads", family.kv_heads) or heads),
            head=int(config.get("head_dim", family.head) or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            epsilon=float(config.get("rms_norm_eps", 1e-6)),
            rope_base=float(_rope(config).get("rope_theta", config.get("rope_theta", 10_000.0))),
            tied=bool(config.get("tie_word_embeddings", False)),
            normed=family.normed,
            biased=family.biased,
        )
