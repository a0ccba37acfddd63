"""Tiny random policies of many architectures, whose answers depend on everything that a version must carry.

- Random weights as transformers makes them say nearly the same whatever stands before: errors would not show. So
  matrices are larger here, and norms, biases, sinks and routers' corrections are random, too.
- Windows are four tokens wide, so that the shortest prompts pass them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coordinator.learner.embedded import make_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip  # one word after the other
GPT: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 48, "n_positions": 128}
WINDOW = {"sliding_window": 4}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = LATENT | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
DOTS: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip  # as above
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64,
    "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_expand": 2,
}  # fmt: skip

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3": ("llama", {}),
    "Llama 3 (scaled positions)": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "Llama 4": (
        "llama4_text",
        {
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral (window)": ("mistral", WINDOW),
    "Mixtral": ("mixtral", {"num_local_experts": 4}),
    "Ministral": ("ministral", WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "Qwen2": ("qwen2", {}),
    "Qwen2 (window)": ("qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 0}),
    "Qwen2-MoE": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 16}),
    "Qwen3": ("qwen3", {}),
    "Qwen3-MoE": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "Qwen3-Next": ("qwen3_next", EXPERTS | DELTA | {"shared_expert_intermediate_size": 16}),
    "Qwen3.5": ("qwen3_5_text", DELTA),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", EXPERTS | DELTA | {"shared_expert_intermediate_size": 16}),
    "Gemma": ("gemma", {}),
    "Gemma 2": (
        "gemma2",
        WINDOW | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "Gemma 3": (
        "gemma3_text",
        WINDOW | {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Phi-2": ("phi", {"partial_rotary_factor": 0.5}),
    "Phi-3 (window)": ("phi3", WINDOW),
    "Phi-4": ("phi3", {"sliding_window": None}),
    "Phi-3.5-MoE": ("phimoe", {"num_local_experts": 4}),
    "OLMo": ("olmo", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "OLMoE": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "GPT-OSS": (
        "gpt_oss",
        WINDOW
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "GPT-OSS (rounded positions)": (
        "gpt_oss",
        WINDOW
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
                "truncate": True,
            },
        },
    ),
    "GPT-2": ("gpt2", GPT),
    "GPT-J": ("gptj", GPT | {"rotary_dim": 4}),
    "GPT-NeoX and Pythia": ("gpt_neox", {}),
    "Falcon": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "BLOOM": ("bloom", {"n_layer": 2, "n_head": 4}),
    "MPT": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    "StableLM": ("stablelm", {}),
    "StarCoder2 (window)": ("starcoder2", WINDOW),
    "StarCoder2": ("starcoder2", {"sliding_window": None}),
    "SmolLM3": ("smollm3", {"num_hidden_layers": 4}),
    "Granite": (
        "granite",
        {"logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "embedding_multiplier": 3.0},
    ),
    "Granite-MoE": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0}),
    "Granite 4 (hybrid)": (
        "granitemoehybrid",
        MAMBA
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
            "layer_types": ["mamba", "attention"],
            "position_embedding_type": "rope",
        },
    ),
    "Command R": ("cohere", {"logit_scale": 0.25}),
    "Command A": ("cohere2", WINDOW | {"logit_scale": 0.25, "layer_types": ["sliding_attention", "full_attention"]}),
    "GLM-4": ("glm", {}),
    "GLM-4 0414": ("glm4", {}),
    "GLM-4.5": (
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "DeepSeek-V2": ("deepseek_v2", DEEPSEEK),
    "DeepSeek-V3": ("deepseek_v3", DEEPSEEK),
    "Kimi Linear": ("kimi_linear", {"num_experts": 4, "num_experts_per_tok": 2}),
    "MiniMax": (
        "minimax",
        {"num_local_experts": 4, "block_size": 4, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "ERNIE 4.5": ("ernie4_5", {}),
    "ERNIE 4.5 MoE": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    ),
    "Seed-OSS": ("seed_oss", {}),
    "EXAONE 4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]}),
    "EXAONE 4 (window)": (
        "exaone4",
        WINDOW | {"sliding_window_pattern": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Hunyuan": ("hunyuan_v1_dense", {}),
    "Nemotron": ("nemotron", {}),
    "Apertus": ("apertus", {}),
    "Arcee": ("arcee", {}),
    "dots.llm1": ("dots1", DOTS | {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]}),
    "dots.llm1 (window)": ("dots1", DOTS | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "Helium": ("helium", {}),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "LFM2-MoE": ("lfm2_moe", EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}),
    "Falcon-H1": ("falcon_h1", MAMBA),
    "Jamba": (
        "jamba",
        {
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    "Bamba": ("bamba", MAMBA | {"attn_layer_indices": [1]}),
    "Nemotron-H": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    "Mamba 2": (
        "mamba2",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2},
    ),
    "RecurrentGemma": (
        "recurrent_gemma",
        {"attention_window_size": 4, "lru_width": 32, "block_types": ["recurrent", "attention"]},
    ),
}


MADE_BY_RULE = ("A_log", "dt_bias", ".D")
"""Weights of state spaces, whose values must stay in a range."""


def make_config(name: str) -> Any:
    """The configuration of a tiny policy."""
    kind, changes = ARCHITECTURES[name]
    sizes = {name: value for name, value in SIZES.items() if kind != "falcon" or name != "head_dim"}
    return AutoConfig.for_model(kind, **(sizes | changes))


def make(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 1) -> Path:
    """Write a tiny policy in hub format."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(make_config(name))  # type: ignore[no-untyped-call]  # transformers annotates half
        with torch.no_grad():
            for key, place in _carried(model):
                if not place.is_floating_point() or key.endswith(MADE_BY_RULE):
                    continue
                if place.ndim < 2:
                    place.add_(0.3 * torch.randn_like(place))
                else:
                    looked_up = any(part in key for part in ("embed", "wte"))
                    size = 0.4 if looked_up or place.ndim > 2 else 1.5 * place.shape[-1] ** -0.5
                    place.copy_(size * torch.randn_like(place))
    model.to(dtype).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def _carried(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that a version must carry."""
    kept = model.state_dict()
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)
