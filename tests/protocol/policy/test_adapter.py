"""An adapter's two files: what is taken, and what is refused because it would make other weights."""

import json
from typing import Any

import pytest

from protocol.policy import adapter

WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def test_names_are_those_of_peft_and_lead_back() -> None:
    down, up = adapter.names(WEIGHT)
    assert down == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert up == "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    assert adapter.adapted([up, down]) == [WEIGHT]


@pytest.mark.parametrize(
    "names",
    [
        [],
        [adapter.names(WEIGHT)[0]],
        [adapter.names(WEIGHT)[1]],
        [*adapter.names(WEIGHT), WEIGHT],
        [*adapter.names(WEIGHT), "base_model.model.lm_head.lora_magnitude_vector"],
        ["q_proj.lora_A.weight", "q_proj.lora_B.weight"],
    ],
)
def test_anything_but_pairs_is_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="two matrices"):
        adapter.adapted(names)


def test_the_scale_is_what_was_written() -> None:
    assert adapter.scale(adapter.config(16, 32.0, {"q_proj"}, "base")) == 2.0
    assert adapter.scale(b'{"r": 8, "lora_alpha": 4}') == 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 0}, "rank"),
        ({"r": 10**9}, "rank"),
        ({"r": True}, "rank"),
        ({"r": "16"}, "rank"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
    ],
)
def test_what_would_make_other_weights_is_refused(changes: dict[str, Any], message: str) -> None:
    said = json.loads(adapter.config(16, 32.0, {"q_proj"}, "base")) | changes
    with pytest.raises(ValueError, match=message):
        adapter.scale(json.dumps(said).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b"{"])
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # of several kinds
        adapter.scale(data)
