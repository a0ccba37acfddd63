"""Architectures that the llama engine converts: llama.cpp's name for each, the numbers it needs, and how its tensors
differ from those of transformers.

- A recipe is listed only if a tiny policy of it matches transformers' log-probabilities within 1e-3 nats
  (`tests/architectures`). Every other architecture is refused by name.
- llama.cpp computes activations, windows and routing in one fixed way for each architecture. If config.json
  differs, the policy is refused, too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, MODEL_TENSOR, ExpertGatingFuncType, RopeScalingType
from numpy.typing import NDArray

from swarm_node.engine.llama.llama_config import LlamaConfig, llama3_factors

Values = NDArray[np.float32]
Change = Callable[[Values], Values]
Made = Sequence[tuple[str, Change | None]]
"""The tensors made from one tensor of the policy: the name in gguf's map, and the change of the values."""

Rule = Callable[[LlamaConfig, str], Made | None]
"""Returns the tensors made from the tensor with this name; None if the rule does not apply."""

Field = Callable[[LlamaConfig, gguf.GGUFWriter], None]

SILU = ("silu", "swish")
RELU_SQUARED = ("relu2",)
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")

RMS_EPSILON = ("rms_norm_eps", "norm_eps")
EPSILON = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
"""Names of the same number in different families."""


@dataclass(frozen=True)
class Recipe:
    """Conversion of one architecture, apart from the numbers that all architectures have."""

    arch: MODEL_ARCH
    activations: tuple[str, ...] = SILU
    rules: tuple[Rule, ...] = ()
    fields: tuple[Field, ...] = ()
    windows: bool = False
    """True if llama.cpp computes windows of attention in the layers that config.json names."""
    partly_rotated: bool = False
    """True if llama.cpp supports heads that are rotated only in part."""
    shares_keys: bool = True
    """True if several heads may share keys; otherwise config.json may still contain an unused number."""
    scalings: tuple[str, ...] = ("linear", "yarn")
    """Supported scalings of rotary positions, besides none."""
    defaults: tuple[tuple[str, Any], ...] = ()
    """Defaults of transformers for values missing in config.json."""

    @property
    def is_exact(self) -> bool:
        """True if float32 weights give float32 results: llama.cpp reads GELU from a table in half precision."""
        return self.activations in (SILU, RELU_SQUARED)


def rows_in_pairs(heads: int) -> Change:
    """Return the reordering of rows that makes rows of a head that are rotated together adjacent."""

    def change(values: Values) -> Values:
        halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)

    return change


def _rotated(config: LlamaConfig, name: str) -> Made | None:
    """Rule for Llama and its relatives: llama.cpp rotates adjacent rows, transformers the halves of a head."""
    if ".q_proj." in name:
        return [(name, rows_in_pairs(config.heads))]
    return [(name, rows_in_pairs(config.kv_heads))] if ".k_proj." in name else None


def _one_more(_config: LlamaConfig, name: str) -> Made | None:
    """Rule for norms that multiply by the stored value plus 1."""
    return [(name, lambda values: values + 1)] if name.endswith("norm.weight") else None


def _flat(_config: LlamaConfig, name: str) -> Made | None:
    return [(name, np.ravel)] if name.endswith("shared_expert_gate.weight") else None


def _transposed(_config: LlamaConfig, name: str) -> Made | None:
    """Rule for GPT-2, which stores its matrices transposed."""
    return [(name, np.transpose)] if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else None


def _grouped_by_heads(config: LlamaConfig, name: str) -> Made | None:
    """Rule for queries, keys and values that are interleaved by head; llama.cpp needs them separate."""
    if "query_key_value" not in name:
        return None
    groups, each = config.kv_heads, config.heads // config.kv_heads

    def change(values: Values) -> Values:
        grouped = values.reshape(groups, each + 2, -1, *values.shape[1:])
        parts = grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]
        return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])

    return [(name, change)]


def _halved(config: LlamaConfig, name: str) -> Made | None:
    """Rule for Granite's experts: gates and inputs in one tensor."""
    if not name.endswith("block_sparse_moe.input_linear.weight"):
        return None
    width, stem = config.whole("intermediate_size"), name.removesuffix("block_sparse_moe.input_linear.weight")
    return [
        (f"{stem}mlp.experts.gate_proj.weight", lambda values: values[:, :width]),
        (f"{stem}mlp.experts.up_proj.weight", lambda values: values[:, width:]),
    ]


def _interleaved(_config: LlamaConfig, name: str) -> Made | None:
    """Rule for GPT-OSS: experts stored transposed, with gates and inputs interleaved; sinks without a suffix."""
    if name.endswith("sinks"):
        return [(f"{name}.weight", None)]
    stem, _, last = name.rpartition(".")
    match last:
        case "down_proj":
            return [(f"{stem}.down_proj.weight", _turned)]
        case "down_proj_bias":
            return [(f"{stem}.down_proj.bias", None)]
        case "gate_up_proj":
            return [
                (f"{stem}.gate_proj.weight", lambda values: _turned(values)[:, ::2]),
                (f"{stem}.up_proj.weight", lambda values: _turned(values)[:, 1::2]),
            ]
        case "gate_up_proj_bias":
            return [
                (f"{stem}.gate_proj.bias", lambda values: values[..., ::2]),
                (f"{stem}.up_proj.bias", lambda values: values[..., 1::2]),
            ]
    return None


def _turned(values: Values) -> Values:
    return values.swapaxes(-1, -2)


def _corrected(_config: LlamaConfig, name: str) -> Made | None:
    if not name.endswith("e_score_correction_bias"):
        return None
    return [(name.removesuffix("_bias") + ".bias", None)]


def _latent(config: LlamaConfig, name: str) -> Made | None:
    """Rule for DeepSeek: split the expansion of keys and values; that of keys is applied to queries."""
    if not name.endswith("kv_b_proj.weight"):
        return None
    heads, keys = config.heads, config.whole("qk_nope_head_dim")
    stem = name.removesuffix("kv_b_proj.weight")

    def split(values: Values) -> Values:
        return values.reshape(heads, -1, values.shape[-1])

    return [
        (f"{stem}k_b_proj.weight", lambda values: _turned(split(values)[:, :keys])),
        (f"{stem}v_b_proj.weight", lambda values: split(values)[:, keys:]),
    ]


def _experts(config: LlamaConfig, writer: gguf.GGUFWriter) -> None:
    writer.add_expert_count(config.whole("num_local_experts", "num_experts", "n_routed_experts"))
    writer.add_expert_used_count(config.whole("num_experts_per_tok"))
    if config.value("moe_intermediate_size") is not None:
        writer.add_expert_feed_forward_length(config.whole("moe_intermediate_size"))


def _weights_sum_to_one(config: LlamaConfig, _writer: gguf.GGUFWriter) -> None:
    config.require("norm_topk_prob", True)


def _weights_as_they_are(config: LlamaConfig, _writer: gguf.GGUFWriter) -> None:
    config.require("norm_topk_prob", False, None)


def _experts_everywhere(config: LlamaConfig, _writer: gguf.GGUFWriter) -> None:
    config.require("decoder_sparse_step", 1)
    if config.value("mlp_only_layers"):
        raise config.refusal("some of its layers have no experts (mlp_only_layers)")


def _shared_expert(config: LlamaConfig, writer: gguf.GGUFWriter) -> None:
    writer.add_expert_shared_feed_forward_length(config.whole("shared_expert_intermediate_size"))


def _some_experts(config: LlamaConfig, writer: gguf.GGUFWriter) -> None:
    """Write the fields of GLM-4.5, DeepSeek and dots: the first layers dense, experts chosen within groups."""
    writer.add_leading_dense_block_count(int(config.value("first_k_dense_replace") or 0))
    writer.add_expert_shared_count(int(config.value("n_shared_experts") or 0))
    writer.add_expert_weights_scale(config.number("routed_scaling_factor"))
    writer.add_expert_weights_norm(bool(config.value("norm_topk_prob")))
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if config.value("n_group") is not None:
        writer.add_expert_group_count(config.whole("n_group"))
        writer.add_expert_group_used_count(config.whole("topk_group"))


def _latent_attention(config: LlamaConfig, writer: gguf.GGUFWriter) -> None:
    rank, rotated = config.whole("kv_lora_rank"), config.whole("qk_rope_head_dim")
    if config.value("q_lora_rank") is not None:
        writer.add_q_lora_rank(config.whole("q_lora_rank"))
    writer.add_kv_lora_rank(rank)
    writer.add_key_length_mla(config.whole("qk_nope_head_dim") + rotated)
    writer.add_value_length_mla(config.whole("v_head_dim"))


def _soft_caps(config: LlamaConfig, writer: gguf.GGUFWriter) -> None:
    writer.add_attn_logit_softcapping(config.number("attn_logit_softcapping"))
    writer.add_final_logit_softcapping(config.number("final_logit_softcapping"))


def _final_soft_cap(config: LlamaConfig, writer: gguf.GGUFWriter) -> None:
    config.require("attn_logit_softcapping", None)
    if config.value("final_logit_softcapping") is not None:
        writer.add_final_logit_softcapping(config.number("final_logit_softcapping"))


LAYERS_27B = {MODEL_ARCH.GEMMA2: 46, MODEL_ARCH.GEMMA3: 62}
"""llama.cpp recognises the Gemmas whose attention is scaled by the model's width by their number of layers."""


def _gemma_scale(arch: MODEL_ARCH) -> Field:
    def check(config: LlamaConfig, _writer: gguf.GGUFWriter) -> None:
        config.require(
            "query_pre_attn_scalar", config.hidden // config.heads if config.layers == LAYERS_27B[arch] else config.head
        )

    return check


def _causal(config: LlamaConfig, _writer: gguf.GGUFWriter) -> None:
    config.require("use_bidirectional_attention", False, None)


def _layer_norm_of_olmo(config: LlamaConfig, writer: gguf.GGUFWriter) -> None:
    writer.add_layer_norm_eps(1e-5)
    if config.value("clip_qkv") is not None:
        writer.add_clamp_kqv(config.number("clip_qkv"))


def _not_clipped(config: LlamaConfig, _writer: gguf.GGUFWriter) -> None:
    config.require("clip_qkv", None)


def _own_keys(config: LlamaConfig, _writer: gguf.GGUFWriter) -> None:
    config.require("num_key_value_heads", config.heads)


def _residual(config: LlamaConfig, writer: gguf.GGUFWriter) -> None:
    writer.add_parallel_residual(config.value("use_parallel_residual") is not False)


def _without_alibi(config: LlamaConfig, writer: gguf.GGUFWriter) -> None:
    config.require("alibi", False)
    config.require("new_decoder_architecture", True)
    writer.add_tensor_data_layout("jploski")


def _multipliers(config: LlamaConfig, writer: gguf.GGUFWriter) -> None:
    writer.add_attention_scale(config.number("attention_multiplier"))
    writer.add_embedding_scale(config.number("embedding_multiplier"))
    writer.add_residual_scale(config.number("residual_multiplier"))
    writer.add_logit_scale(config.number("logits_scaling"))


def _logit_scale(config: LlamaConfig, writer: gguf.GGUFWriter) -> None:
    writer.add_logit_scale(config.number("logit_scale"))
    writer.add_rope_scaling_type(RopeScalingType.NONE)


def _every_fourth_unrotated(config: LlamaConfig, _writer: gguf.GGUFWriter) -> None:
    rotated = [(layer + 1) % 4 != 0 for layer in range(config.layers)]
    if [bool(value) for value in config.value("no_rope_layers") or ()] != rotated:
        raise config.refusal("llama.cpp leaves every fourth layer without positions, and config.json others")


def _clamped(config: LlamaConfig, writer: gguf.GGUFWriter) -> None:
    config.require("swiglu_limit", 7.0, None)
    config.require("swiglu_alpha", 1.702, None)
    writer.add_expert_feed_forward_length(config.whole("intermediate_size"))


def _alibi(config: LlamaConfig, writer: gguf.GGUFWriter) -> None:
    attention = dict(config.value("attn_config") or {})
    if not attention.get("alibi", True) or attention.get("qk_ln") or attention.get("softmax_scale"):
        raise config.refusal("llama.cpp knows MPT with ALiBi positions only")
    writer.add_max_alibi_bias(float(attention.get("alibi_bias_max", 8)))
    if attention.get("clip_qkv"):
        writer.add_clamp_kqv(float(attention["clip_qkv"]))


def _plain_residual(config: LlamaConfig, _writer: gguf.GGUFWriter) -> None:
    config.require("apply_residual_connection_post_layernorm", False, None)


LLAMA = Recipe(MODEL_ARCH.LLAMA, rules=(_rotated,), scalings=("linear", "yarn", "llama3"))

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "llama": LLAMA,
        "mistral": LLAMA,
        "ministral": LLAMA,
        "mixtral": Recipe(MODEL_ARCH.LLAMA, rules=(_rotated,), fields=(_experts,)),
        "qwen2": Recipe(MODEL_ARCH.QWEN2),
        "qwen2_moe": Recipe(
            MODEL_ARCH.QWEN2MOE,
            rules=(_flat,),
            fields=(_experts, _weights_as_they_are, _experts_everywhere, _shared_expert),
        ),
        "qwen3": Recipe(
            MODEL_ARCH.QWEN3,
            defaults=(
                ("head_dim", 128),
                ("num_key_value_heads", 32),
                ("rms_norm_eps", 1e-6),
                ("rope_theta", 10_000.0),
                ("max_position_embeddings", 32_768),
            ),
        ),
        "qwen3_moe": Recipe(MODEL_ARCH.QWEN3MOE, fields=(_experts, _weights_sum_to_one, _experts_everywhere)),
        "gemma": Recipe(MODEL_ARCH.GEMMA, GELU_TANH, rules=(_one_more,), fields=(_causal,)),
        "gemma2": Recipe(
            MODEL_ARCH.GEMMA2, GELU_TANH, (_one_more,), (_soft_caps, _gemma_scale(MODEL_ARCH.GEMMA2), _causal), True
        ),
        "gemma3_text": Recipe(
            MODEL_ARCH.GEMMA3,
            GELU_TANH,
            (_one_more,),
            (_final_soft_cap, _gemma_scale(MODEL_ARCH.GEMMA3), _causal),
            True,
        ),
        "phi": Recipe(MODEL_ARCH.PHI2, GELU_TANH, partly_rotated=True),
        "phi3": Recipe(MODEL_ARCH.PHI3, partly_rotated=True),
        "olmo": Recipe(MODEL_ARCH.OLMO, rules=(_rotated,), fields=(_layer_norm_of_olmo,)),
        "olmo2": Recipe(MODEL_ARCH.OLMO2),
        "olmo3": Recipe(MODEL_ARCH.OLMO2, windows=True),
        "olmoe": Recipe(MODEL_ARCH.OLMOE, fields=(_experts, _weights_as_they_are, _not_clipped, _own_keys)),
        "gpt_oss": Recipe(MODEL_ARCH.GPT_OSS, rules=(_interleaved,), fields=(_experts, _clamped), windows=True),
        "gpt2": Recipe(MODEL_ARCH.GPT2, GELU_TANH, rules=(_transposed,), shares_keys=False),
        "gpt_neox": Recipe(
            MODEL_ARCH.GPTNEOX, ("gelu", *GELU_TANH), (_grouped_by_heads,), (_residual,), False, True, False
        ),
        "falcon": Recipe(MODEL_ARCH.FALCON, ("gelu",), (_grouped_by_heads,), (_without_alibi,)),
        "bloom": Recipe(MODEL_ARCH.BLOOM, GELU_TANH, (_grouped_by_heads,), (_plain_residual,), shares_keys=False),
        "mpt": Recipe(MODEL_ARCH.MPT, ("gelu",), fields=(_alibi,), shares_keys=False),
        "stablelm": Recipe(MODEL_ARCH.STABLELM, fields=(_residual,), partly_rotated=True),
        "starcoder2": Recipe(MODEL_ARCH.STARCODER2, GELU_TANH),
        "smollm3": Recipe(MODEL_ARCH.SMOLLM3, rules=(_rotated,), fields=(_every_fourth_unrotated,)),
        "granite": Recipe(MODEL_ARCH.GRANITE, rules=(_rotated,), fields=(_multipliers,)),
        "granitemoe": Recipe(MODEL_ARCH.GRANITE_MOE, rules=(_rotated, _halved), fields=(_multipliers, _experts)),
        "cohere": Recipe(MODEL_ARCH.COMMAND_R, fields=(_logit_scale,), scalings=()),
        "cohere2": Recipe(MODEL_ARCH.COHERE2, fields=(_logit_scale,), windows=True, scalings=()),
        "glm": Recipe(MODEL_ARCH.CHATGLM, partly_rotated=True),
        "glm4": Recipe(MODEL_ARCH.GLM4, partly_rotated=True),
        "glm4_moe": Recipe(
            MODEL_ARCH.GLM4_MOE, rules=(_corrected,), fields=(_experts, _some_experts), partly_rotated=True
        ),
        "deepseek_v3": Recipe(
            MODEL_ARCH.DEEPSEEK2, rules=(_corrected, _latent), fields=(_experts, _some_experts, _latent_attention)
        ),
        "ernie4_5": Recipe(MODEL_ARCH.ERNIE4_5),
        "seed_oss": Recipe(MODEL_ARCH.SEED_OSS),
        "exaone4": Recipe(MODEL_ARCH.EXAONE4, scalings=("llama3",)),
        "hunyuan_v1_dense": Recipe(MODEL_ARCH.HUNYUAN_DENSE),
        "nemotron": Recipe(MODEL_ARCH.NEMOTRON, RELU_SQUARED, (_one_more,), partly_rotated=True),
        "arcee": Recipe(MODEL_ARCH.ARCEE, RELU_SQUARED, (_rotated,), scalings=("linear", "yarn")),
        "dots1": Recipe(MODEL_ARCH.DOTS1, rules=(_corrected,), fields=(_experts, _some_experts, _own_keys)),
    }
)
"""Recipes by `model_type`."""


def recipe_of(values: Mapping[str, Any]) -> tuple[Recipe, LlamaConfig]:
    """Return the recipe and the numbers of this configuration; raise an error if it cannot be converted."""
    recipe = RECIPES.get(str(values.get("model_type", "")))
    config = LlamaConfig(
        values, dict(recipe.defaults) if recipe else {}, shares_keys=recipe is None or recipe.shares_keys
    )
    if recipe is None:
        raise config.refusal("it converts no policy of this architecture")
    if values.get("quantization_config"):
        raise config.refusal("its weights are quantized")
    act = config.value("hidden_act", "hidden_activation", "activation_function", "activation")
    if act is not None and act not in recipe.activations:
        raise config.refusal(f"llama.cpp computes {recipe.activations[0]}, and config.json names {act}")
    if config.is_windowed and not recipe.windows:
        raise config.refusal("llama.cpp computes its attention without windows")
    scaling = _scaling(config)
    if scaling != "default" and scaling not in recipe.scalings:
        raise config.refusal(f"rotary positions of the kind {scaling}")
    if scaling == "yarn" and config.rope().get("truncate") is False:
        raise config.refusal("llama.cpp rounds the bounds of yarn's positions, and config.json says not to")
    if config.rotated() != config.head and not recipe.partly_rotated:
        raise config.refusal("only a part of each head is rotated")
    if config.heads % config.kv_heads:
        raise config.refusal(f"{config.heads} heads do not share {config.kv_heads} keys evenly")
    return recipe, config


def _scaling(config: LlamaConfig) -> str:
    rope = config.rope()
    return str(rope.get("rope_type") or rope.get("type") or "default")


def write_fields(recipe: Recipe, config: LlamaConfig, width: int | None, writer: gguf.GGUFWriter) -> None:
    """Write the fields that llama.cpp needs besides the tensors; `width` is that of the dense layers."""
    writer.add_block_count(config.layers)
    writer.add_context_length(config.positions)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(width or config.whole("intermediate_size"))
    latent = recipe.arch == MODEL_ARCH.DEEPSEEK2
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(1 if latent else config.kv_heads)
    writer.add_key_length(config.whole("kv_lora_rank") + config.whole("qk_rope_head_dim") if latent else config.head)
    writer.add_value_length(config.whole("kv_lora_rank") if latent else config.head)
    _write_positions(recipe, config, writer)
    if config.value(*RMS_EPSILON) is not None:
        writer.add_layer_norm_rms_eps(config.number(*RMS_EPSILON))
    if config.value(*EPSILON) is not None:
        writer.add_layer_norm_eps(config.number(*EPSILON))
    if recipe.windows and any(config.windows):
        if not config.value("layer_types"):
            raise config.refusal("config.json does not name the layers that see a window only")
        writer.add_sliding_window(config.whole("sliding_window"))
        writer.add_sliding_window_pattern(config.windows)
    elif recipe.arch in (MODEL_ARCH.GEMMA2, MODEL_ARCH.COHERE2, MODEL_ARCH.GPT_OSS):  # llama.cpp would assume windows
        raise config.refusal("llama.cpp computes windows that config.json does not name")
    for field in recipe.fields:
        field(config, writer)
    writer.add_vocab_size(config.vocabulary)


def _write_positions(recipe: Recipe, config: LlamaConfig, writer: gguf.GGUFWriter) -> None:
    latent = recipe.arch == MODEL_ARCH.DEEPSEEK2
    writer.add_rope_dimension_count(config.whole("qk_rope_head_dim") if latent else config.rotated())
    rope, scaling = config.rope(), _scaling(config)
    if rope or config.value("rope_theta", "rotary_emb_base") is not None:
        writer.add_rope_freq_base(config.rope_base())
    local = config.rope("sliding_attention").get("rope_theta", config.value("rope_local_base_freq"))
    if any(config.windows) and local is not None:
        writer.add_rope_freq_base_swa(float(local))
    if scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(scaling))
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
        for name, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if rope.get(name) is not None:
                add(float(rope[name]))


def constants(config: LlamaConfig) -> dict[str, Values]:
    """Return the tensors that llama.cpp needs and no policy has."""
    if _scaling(config) != "llama3":
        return {}
    return {gguf.TENSOR_NAMES[MODEL_TENSOR.ROPE_FREQS] + ".weight": llama3_factors(config)}
