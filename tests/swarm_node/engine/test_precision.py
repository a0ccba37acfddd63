"""The engine and precision for a round's model, by its size, its architecture, free memory and admitted classes."""

import json
from typing import Any

import pytest

from protocol.errors import EngineFailed
from protocol.limits import GB
from swarm_node.engine.child import splits
from swarm_node.engine.choose import EngineOptions, HostMachine
from swarm_node.engine.precision import Memory, Model, choose_precision, describe_model, needed_bytes
from swarm_node.engine.vllm.command import VllmInstallation

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 320, "max_position_embeddings": 128, "dtype": "bfloat16",
}  # fmt: skip  # one word after the other
WINDOWED = LLAMA | {"model_type": "mistral", "sliding_window": 16}
GEMMA = LLAMA | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}
UNKNOWN = LLAMA | {"model_type": "mamba2"}
FOUR_B = Model(8 * GB, "bfloat16")


def model(config: dict[str, Any], size_bytes: int = GB) -> Model:
    """Describe it in a child, as the agent does."""
    return describe_model(size_bytes, json.dumps(config).encode())


ALL = frozenset({"torch", "transformers", "llama_cpp", "gguf"})


def machine(*, packages: frozenset[str] = ALL, nvidia: bool = False, offloads: bool = False) -> HostMachine:
    return HostMachine(nvidia, packages, offloads, lambda _python: "not asked for")


@pytest.mark.parametrize(
    ("free_gb", "offloads", "expected"),
    [
        (100, True, ("llama", "float32")),
        (12, True, ("llama", "float16")),
        (7, True, ("llama", "q8_0")),
        (100, False, ("torch", "float32")),
        (12, False, ("torch", "bfloat16")),
        (7, False, ("llama", "q8_0")),
    ],
)
def test_the_precision_is_the_finest_that_fits(free_gb: int, offloads: bool, expected: tuple[str, str]) -> None:
    memory = Memory(free_gb * GB, free_gb * GB)
    found = choose_precision("auto", EngineOptions(), machine(offloads=offloads), FOUR_B, memory)
    assert (found.engine, found.dtype) == expected
    assert f"{found.engine} in {found.dtype}: 4.00 billion parameters" in found.line
    assert f"of {free_gb}.0 GB memory" in found.line


def test_a_card_computes_in_the_type_of_the_policy() -> None:
    here = machine(packages=frozenset({"torch", "transformers"}), nvidia=True)
    assert choose_precision("auto", EngineOptions(), here, FOUR_B, Memory(12 * GB, 0)).dtype == "bfloat16"


@pytest.mark.parametrize("wanted", ["auto", "llama", "torch"])
def test_where_nothing_fits_the_figures_are_given_with_the_next_step(wanted: str) -> None:
    with pytest.raises(EngineFailed, match=r"4\.00 billion parameters take about .* and 2\.0 GB of memory") as refused:
        choose_precision(wanted, EngineOptions(), machine(), FOUR_B, Memory(None, 2 * GB))
    assert refused.value.message.startswith("No engine on this machine can run this round's model. ")
    assert "another model, free memory" in refused.value.hint


def test_a_precision_that_the_owner_named_is_kept_or_refused() -> None:
    memory = Memory(None, 12 * GB)
    assert choose_precision("llama", EngineOptions(dtype="q8_0"), machine(), FOUR_B, memory).dtype == "q8_0"
    with pytest.raises(EngineFailed, match=r"20\.5 GB in float32, and 12\.0 GB"):
        choose_precision("llama", EngineOptions(dtype="float32"), machine(), FOUR_B, memory)


def test_memory_that_nobody_states_refuses_nothing() -> None:
    found = choose_precision("auto", EngineOptions(), machine(), FOUR_B, Memory(None, None))
    assert (found.dtype, "memory is not known" in found.line) == ("float32", True)


def test_only_classes_that_the_round_admits_are_chosen() -> None:
    memory = Memory(None, 100 * GB)
    found = choose_precision("auto", EngineOptions(), machine(), FOUR_B, memory, ["torch/bf16/cuda", "llama/q8_0/cpu"])
    assert (found.engine, found.dtype) == ("llama", "q8_0")
    assert "torch" in found.unfit
    with pytest.raises(EngineFailed, match="the round admits torch/bf16/cuda, and this machine computes torch/fp32"):
        choose_precision("torch", EngineOptions(), machine(), FOUR_B, memory, ["torch/bf16/cuda"])


@pytest.mark.parametrize("admitted", ["exact/fp32/cpu-0123456789ab", "torch/fp32/cpu"])
def test_an_exact_node_joins_a_round_that_admits_an_exact_class_or_float32(admitted: str) -> None:
    memory, options = Memory(None, 100 * GB), EngineOptions(dtype="exact")
    found = choose_precision("auto", options, machine(), FOUR_B, memory, ["torch/bf16/cuda", admitted])
    assert (found.engine, found.dtype) == ("torch", "exact")
    with pytest.raises(EngineFailed, match="the round admits torch/bf16/cuda"):
        choose_precision("auto", options, machine(), FOUR_B, memory, ["torch/bf16/cuda"])
    with pytest.raises(EngineFailed, match=f"the round admits {admitted}"):
        choose_precision("torch", EngineOptions(dtype="bfloat16"), machine(), FOUR_B, memory, [admitted])


def test_an_activation_in_half_precision_counts_as_such() -> None:
    memory, gemma = Memory(None, 100 * GB), model(GEMMA)
    assert choose_precision("llama", EngineOptions(), machine(), gemma, memory, ["llama/fp16/cpu"]).dtype == "float32"


@pytest.mark.parametrize(
    ("wanted", "config", "reason"),
    [
        ("llama", WINDOWED, r"does not support this policy \(mistral\)"),
        ("auto", UNKNOWN, "mamba2 is not supported"),
        ("llama", LLAMA | {"num_hidden_layers": 10**12}, "llama.cpp has at most 512 layers"),
        ("torch", LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ],
)
def test_a_model_that_no_engine_knows_is_refused_by_name(wanted: str, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineFailed, match=reason):
        choose_precision(wanted, EngineOptions(), machine(offloads=True), model(config), Memory(100 * GB, 100 * GB))


def test_another_engine_takes_what_the_first_does_not_know() -> None:
    found = choose_precision("auto", EngineOptions(), machine(offloads=True), model(WINDOWED), Memory(None, None))
    assert found.engine == "torch"
    assert "mistral" in found.unfit["llama"]


def test_a_model_is_described_by_a_child() -> None:
    assert model(LLAMA) == Model(GB, "bfloat16", splits=(2, 4))
    assert model(LLAMA | {"dtype": "int4"}) == Model(GB, splits=(2, 4))


@pytest.mark.parametrize("config", [None, b"", b"[]", b"\xff", b"[" * 100_000])
def test_a_model_whose_configuration_is_not_known_is_judged_by_its_size(config: bytes | None) -> None:
    assert describe_model(GB, config) == Model(GB)
    assert choose_precision("auto", EngineOptions(), machine(), Model(GB), Memory(None, 100 * GB)).engine == "torch"
    assert needed_bytes(10**9, "q8_0") < needed_bytes(10**9, "float16") < needed_bytes(10**9, "float32")


def test_a_card_that_torch_cannot_use_counts_for_nothing() -> None:
    here = machine(packages=frozenset({"torch", "transformers"}), nvidia=True)._replace(driver=550, torch_cuda=13)
    found = choose_precision("auto", EngineOptions(), here, FOUR_B, Memory(100 * GB, 12 * GB), ("torch/bf16/cpu",))
    assert found.dtype == "bfloat16"
    with pytest.raises(EngineFailed, match="this machine computes torch/fp32/cpu, torch/bf16/cpu"):
        choose_precision("auto", EngineOptions(), here, FOUR_B, Memory(100 * GB, 100 * GB), ("torch/bf16/cuda",))


THIRTY_B = Model(60 * GB, "bfloat16", splits=(2, 4, 8))
VLLM = EngineOptions(vllm_python="/vllm/python")
FOUR_CARDS = Memory(23 * GB, 64 * GB, {2: 23 * GB, 4: 22 * GB})


def with_vllm() -> HostMachine:
    here = machine(packages=frozenset({"torch", "transformers"}), nvidia=True)
    return here._replace(find_vllm=lambda _python: VllmInstallation("0.32.0", "cuda"))


def test_vllm_joins_the_fewest_cards_that_hold_the_model_if_one_does_not() -> None:
    found = choose_precision("auto", VLLM, with_vllm(), THIRTY_B, FOUR_CARDS)
    assert (found.engine, found.dtype, found.cards) == ("vllm", "bfloat16", 4)
    assert found.need_bytes == needed_bytes(30 * 10**9, "bfloat16", 4) < 22 * GB
    assert found.cards_line == "4 cards per engine: the model needs about 75.5 GB, one card has 23.0 GB free"
    assert "about 19.8 GB of 22.0 GB memory of each of 4 cards" in found.line
    small = choose_precision("auto", VLLM, with_vllm(), FOUR_B._replace(splits=(2, 4)), FOUR_CARDS)
    assert (small.cards, small.cards_line) == (
        1,
        "1 card per engine: the model needs about 10.5 GB, and one card has 23.0 GB free",
    )
    assert choose_precision("auto", VLLM, with_vllm(), FOUR_B, Memory(23 * GB, 0)).cards_line == "", "one card"


def test_a_number_of_cards_that_the_owner_set_is_kept_or_refused() -> None:
    def joined(number: int, model: Model = THIRTY_B) -> int:
        options = VLLM._replace(cards_per_engine=number)
        return choose_precision("auto", options, with_vllm(), model, FOUR_CARDS).cards

    assert joined(2, FOUR_B._replace(splits=(2,))) == 2
    with pytest.raises(EngineFailed, match=r"take about 75\.5 GB in bfloat16, and 23\.0 GB"):
        joined(1)
    with pytest.raises(EngineFailed, match=r"about 38\.6 GB in bfloat16 on each of 2 cards, and 23\.0 GB"):
        joined(2)
    with pytest.raises(EngineFailed, match="vLLM cannot split this model over 4 cards"):
        joined(4, THIRTY_B._replace(splits=(2,)))
    with pytest.raises(EngineFailed, match="this machine has no 8 graphics cards of one kind"):
        joined(8)


@pytest.mark.parametrize("wanted", ["auto", "torch"])
def test_an_engine_that_joins_no_cards_names_the_one_that_does(wanted: str) -> None:
    here = machine(packages=frozenset({"torch", "transformers"}), nvidia=True)
    with pytest.raises(EngineFailed, match=r"take about 75\.5 GB in bfloat16") as refused:
        choose_precision(wanted, EngineOptions(), here, THIRTY_B, FOUR_CARDS)
    assert refused.value.hint.startswith(
        "vLLM can join 4 cards for this model: `--engine vllm` takes `pip install vllm"
    )
    with pytest.raises(EngineFailed) as alone:
        choose_precision(wanted, EngineOptions(), here, THIRTY_B, Memory(23 * GB, 64 * GB))
    assert "vLLM" not in alone.value.hint


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [2, 4]),
        ({"num_key_value_heads": 2}, [2, 4]),
        ({"num_attention_heads": 24, "num_key_value_heads": 8}, [2, 4, 8]),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, []),
        ({"num_attention_heads": 24, "num_key_value_heads": 3}, []),
        ({"intermediate_size": 98}, [2]),
        ({"num_attention_heads": None}, []),
        ({"num_attention_heads": None, "text_config": {"num_attention_heads": 2, "num_key_value_heads": 1}}, [2]),
    ],
)
def test_a_model_is_split_where_each_card_gets_as_many_heads(changes: dict[str, Any], expected: list[int]) -> None:
    assert splits(LLAMA | changes) == expected


def test_fp8_halves_the_memory_and_needs_a_class_that_the_round_admits() -> None:
    options, memory = VLLM._replace(dtype="fp8"), Memory(8 * GB, 64 * GB)
    found = choose_precision("auto", options, with_vllm(), FOUR_B, memory, ["vllm/fp8/cuda"])
    assert (found.engine, found.dtype) == ("vllm", "fp8")
    assert found.need_bytes == needed_bytes(4 * 10**9, "fp8")
    with pytest.raises(EngineFailed, match="the round admits vllm/bf16/cuda, and this machine computes vllm/fp8/cuda"):
        choose_precision("auto", options, with_vllm(), FOUR_B, memory, ["vllm/bf16/cuda"])
