"""A policy of a few kilobytes, made without torch: a Qwen3 with random weights, as an engine is to load it."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCABULARY, HIDDEN, HEADS, HEAD, INTERMEDIATE, LAYERS = 256, 64, 2, 32, 96, 1

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "dtype": "float32",
}


def make_tiny_model(folder: Path) -> Path:
    """Write it into a new folder."""
    chance = np.random.default_rng(1)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (HEADS * HEAD, HIDDEN) for name in "qkv"}
        shapes |= {f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD)}
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE)}
        shapes |= {f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    folder.mkdir(parents=True)
    tensors = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else chance.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
