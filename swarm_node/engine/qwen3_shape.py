"""What config.json says of a Qwen3: whether our engines know it, and its sizes; read without torch."""

from dataclasses import dataclass
from typing import Any


def supports(config: dict[str, Any]) -> bool:
    """Whether this is a Qwen3 without any speciality."""
    return (
        config.get("model_type") == "qwen3"
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("attention_bias")
        and not config.get("use_sliding_window")
        and set(config.get("layer_types") or ()) <= {"full_attention"}
        and not config.get("quantization_config")
        and config.get("partial_rotary_factor") is None
        and _rope(config).keys() <= {"rope_type", "type", "rope_theta"}
        and all(_rope(config).get(name, "default") == "default" for name in ("rope_type", "type"))
    )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of rotary positions: its old form goes before the new one, as in transformers."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3; what config.json leaves out is as in transformers."""

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

    @staticmethod
    def of(config: dict[str, Any]) -> "Shape":
        heads = int(config["num_attention_heads"])
        return Shape(
            vocabulary=int(config["vocab_size"]),
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads", 32) or heads),
            head=int(config.get("head_dim", 128)),
            intermediate=int(config["intermediate_size"]),
            epsilon=float(config.get("rms_norm_eps", 1e-6)),
            rope_base=float(_rope(config).get("rope_theta", config.get("rope_theta", 10_000.0))),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
