"""Which engine is taken for which machine, and what is said of it."""

from typing import Any

import pytest

from protocol.errors import ConfigInvalid
from swarm_node.engine.choose import Machine, Options, choose

QWEN = {"model_type": "qwen3"}
BOTH = frozenset({"torch", "transformers", "llama_cpp", "gguf"})
TORCH = frozenset({"torch", "transformers"})
LLAMA = frozenset({"llama_cpp", "gguf"})


def machine(packages: frozenset[str], *, nvidia: bool = False, llama_offloads: bool = False) -> Machine:
    return Machine(nvidia, packages, llama_offloads)


@pytest.mark.parametrize(
    ("here", "options", "config", "name", "why"),
    [
        (machine(BOTH), Options(), QWEN, "torch", "not llama: in float32 torch is faster"),
        (machine(BOTH), Options(), None, "torch", "not llama: in float32 torch is faster"),
        (machine(BOTH), Options(dtype="bfloat16"), QWEN, "llama", "llama: llama-cpp-python is installed"),
        (machine(LLAMA), Options(), QWEN, "llama", "llama: llama-cpp-python is installed"),
        (machine(TORCH), Options(), QWEN, "torch", "gguf and llama_cpp not installed"),
        (machine(BOTH), Options(dtype="bfloat16"), {"model_type": "gemma"}, "torch", "the policy is 'gemma'"),
        (machine(BOTH, nvidia=True), Options(), QWEN, "torch", "leaves the NVIDIA GPU idle"),
        (machine(BOTH, nvidia=True), Options(dtype="bfloat16", device="cpu"), QWEN, "llama", "installed"),
        (machine(BOTH, nvidia=True, llama_offloads=True), Options(), QWEN, "llama", "uses the GPU"),
        (machine(LLAMA, nvidia=True), Options(), QWEN, "llama", "installed"),
        (machine(BOTH), Options(device="cuda"), QWEN, "torch", "has no GPU"),
    ],
)
def test_the_first_engine_that_fits_is_taken(
    here: Machine, options: Options, config: dict[str, Any] | None, name: str, why: str
) -> None:
    choice = choose("auto", options, here, config)
    assert choice.name == name
    assert why in choice.why
    assert "\n" not in choice.why
    assert choice.command[choice.command.index("--engine") + 1] == name


def test_a_precision_that_only_one_engine_has_chooses_it() -> None:
    here = machine(BOTH, nvidia=True, llama_offloads=True)
    assert choose("auto", Options(dtype="q8_0"), here, QWEN).name == "llama"
    with pytest.raises(ConfigInvalid, match="does not compute in q8_0, but in bfloat16, float32"):
        choose("torch", Options(dtype="q8_0"), here, QWEN)


def test_a_named_engine_is_taken_or_refused_with_what_it_lacks() -> None:
    assert choose("torch", Options(), machine(BOTH), QWEN).why == "torch: it was asked for"
    assert choose("llama", Options(), machine(BOTH, nvidia=True), QWEN).why == "llama: it was asked for"
    with pytest.raises(ConfigInvalid, match="llama: gguf and llama_cpp not installed") as refused:
        choose("llama", Options(), machine(TORCH), QWEN)
    assert "echo-swarm[llama]" in refused.value.hint
    assert "echo-swarm[torch]" not in refused.value.hint


def test_with_nothing_installed_the_next_step_is_said() -> None:
    with pytest.raises(ConfigInvalid, match="No engine can sample here") as refused:
        choose("auto", Options(), machine(frozenset()))
    assert "pip install 'echo-swarm[torch]'" in refused.value.hint
