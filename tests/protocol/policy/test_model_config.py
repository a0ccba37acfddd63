"""Promises of a configuration: no code, and no sizes that its files do not bear out."""

from typing import Any

import pytest

from protocol.policy.model_config import require_borne_out, require_layers, require_plain

KERNEL = "kernels-community/flash-attn2@main:run"


@pytest.mark.parametrize(
    "config",
    [
        {"auto_map": {}},
        {"auto_map": None},
        {"text_config": {"auto_map": {"AutoModel": "modeling.Model"}}},
        {"attn_implementation": KERNEL},
        {"_attn_implementation": KERNEL},
        {"experts_implementation": "somebody/experts"},
        {"attn_implementation": "flash_attention_2"},
        {"attn_implementation": {"": "sdpa", "text_config": KERNEL}},
        {"attn_implementation": [KERNEL]},
        {"vision": [{"inner": {"attn_implementation": KERNEL}}]},
    ],
    ids=str,
)
def test_a_configuration_that_names_code_is_refused_however_deep_it_hides(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="names code"):
        require_plain({"model_type": "qwen3", **config})


@pytest.mark.parametrize(
    "config",
    [{}, {"attn_implementation": None}, {"attn_implementation": "sdpa"}, {"attn_implementation": {"": "eager"}}],
    ids=str,
)
def test_an_ordinary_configuration_is_plain(config: dict[str, Any]) -> None:
    require_plain({"model_type": "qwen3", "layer_types": ["full_attention"], **config})


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer", "decoder_layers"])
def test_more_layers_than_tensors_are_refused_before_they_are_made(name: str, inside: bool) -> None:
    def config(layers: Any) -> dict[str, Any]:
        return {"text_config": {name: layers}} if inside else {name: layers}

    require_layers(config(12), 12)
    require_layers(config(None), 12)
    for layers in (13, 10**8):
        with pytest.raises(ValueError, match=f"has {layers} layers, but there are 12 tensors"):
            require_layers(config(layers), 12)


def test_more_numbers_than_the_files_can_hold_are_refused() -> None:
    require_borne_out(200, 100)
    with pytest.raises(ValueError, match="has 201 parameters, but the tensors have 100 bytes"):
        require_borne_out(201, 100)


def test_a_nest_is_looked_through_without_end() -> None:
    config: dict[str, Any] = {}
    for _ in range(100_000):
        config = {"inner": config}
    require_plain(config)
    require_layers(config, 1)
