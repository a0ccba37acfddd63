"""Shapes give the published numbers of parameters, and rooflines move as memory and arithmetic say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.learner.memory_plan import CARDS_GIB
from coordinator.rules import hardware
from coordinator.rules.hardware import MODELS, SPEEDS, DecoderShape
from protocol.errors import ConfigInvalid


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("hf://Qwen/Qwen3-8B", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496),
    ],
)
def test_a_name_gives_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert hardware.find_shape(name).parameters == parameters


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4", "gpt-9", "", "Qwen/Qwen3-40B"])
def test_an_unknown_model_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        hardware.find_shape(name)
    assert "qwen/qwen3-4b" in refused.value.hint


def test_an_unknown_card_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        hardware.find_speed("h1000")
    assert "h100," in refused.value.hint


def test_every_card_with_a_memory_has_a_speed() -> None:
    assert set(SPEEDS) == set(CARDS_GIB)


@pytest.mark.parametrize("name", MODELS)
def test_a_shape_and_its_config_say_the_same(name: str) -> None:
    assert DecoderShape.from_config(MODELS[name].to_config()) == MODELS[name]


def test_a_config_of_another_kind_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        DecoderShape.from_config({"model_type": "t5"})
    assert "--train-s" in refused.value.hint


@given(st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(SPEEDS)), st.integers(1, 255), st.floats(64, 8192))
def test_more_sequences_are_never_slower_and_never_faster_than_memory_and_arithmetic_allow(
    model: str, card: str, sequences: int, length: float
) -> None:
    shape, speed = MODELS[model], SPEEDS[card]
    rate = hardware.sampled_per_s(shape, speed, sequences, length)
    assert rate <= hardware.sampled_per_s(shape, speed, sequences + 1, length) * (1 + 1e-9)
    assert rate <= speed.tflops * 1e12 / (2 * shape.products) * (1 + 1e-9)
    assert rate <= sequences * speed.gb_per_s * 1e9 / shape.size_bytes


def test_weights_that_do_not_fit_leave_no_sequence() -> None:
    shape = hardware.find_shape("qwen3-32b")
    assert hardware.sequences_at_once(shape, 24 * 2**30, 1000) == 0
    assert hardware.sequences_at_once(shape, 80 * 2**30, 1000) > 0
