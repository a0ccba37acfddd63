"""The answer to what a machine can run: lists of rounds say the same as `join`, on fake machines."""

import pytest

from protocol.errors import SwarmError
from protocol.limits import GB
from swarm_node.engine.capacity import Capacity, HostReadings, measure, measure_or_explain
from swarm_node.engine.choose import EngineOptions, HostMachine
from swarm_node.engine.precision import Model, choose_precision
from swarm_node.engine.vllm.command import VllmInstallation
from swarm_node.machine.gpu import Card, GpuProbe

TORCH = frozenset({"torch", "transformers"})
VLLM = EngineOptions(vllm_python="/vllm/python")
CARD = Card("nvidia", "RTX 4090", "580.65", 24 * GB, 1 * GB)


def cards(*used_gb: int) -> GpuProbe:
    return GpuProbe(tuple(CARD._replace(number=number, used_bytes=used * GB) for number, used in enumerate(used_gb)))


def machine(*, nvidia: bool = True) -> HostMachine:
    return HostMachine(nvidia, TORCH, llama_offloads=False, find_vllm=lambda _: VllmInstallation("0.32.0", "cuda"))


def here(probe: GpuProbe, options: EngineOptions = VLLM, free_gb: int = 64) -> Capacity:
    return measure(
        "auto", options, HostReadings(machine(nvidia=bool(probe.cards)), probe, free_gb * GB, environment={})
    )


@pytest.mark.parametrize("size_gb", [8, 20, 30, 60, 90])
@pytest.mark.parametrize("options", [VLLM, VLLM._replace(cards_per_engine=1), EngineOptions()])
@pytest.mark.parametrize("used_gb", [(1,), (1, 1), (1, 20), (1, 1, 1, 1), (9, 9, 20, 20)])
def test_a_list_of_rounds_says_what_join_would_do(
    size_gb: int, options: EngineOptions, used_gb: tuple[int, ...]
) -> None:
    """A model in bf16 that every number of cards can share: its size decides, as a list has it."""
    found = here(cards(*used_gb), options)
    try:
        model = Model(size_gb * GB, "bfloat16", splits=(2, 4, 8))
        choose_precision("auto", options, machine(), model, found.memory)
        joins = True
    except SwarmError:
        joins = False
    assert (found.why_too_large(size_gb * GB) == "") is joins


def test_cards_of_which_other_programs_hold_memory_count_with_what_is_free() -> None:
    assert here(cards(1, 1)).why_too_large(28 * GB) == ""
    assert here(cards(1, 12)).why_too_large(28 * GB) == (
        "its model needs about 35.5 GB, and 23.0 GB of GPU memory are free, 24.0 GB on joined cards"
    )
    assert here(cards(1, 1), EngineOptions()).why_too_large(28 * GB).endswith("23.0 GB of GPU memory are free")


def test_a_share_of_the_card_that_the_owner_set_is_the_limit() -> None:
    assert "12.0 GB of GPU memory" in here(cards(1), EngineOptions(vram_share=0.5)).why_too_large(16 * GB)


def test_an_engine_on_the_cpu_has_the_memory_of_the_machine_whatever_cards_there_are() -> None:
    found = here(cards(1), EngineOptions(device="cpu"), free_gb=9)
    assert found.memory.card is None
    assert "9.0 GB of memory are free" in found.why_too_large(16 * GB)


def test_a_card_of_unknown_memory_is_not_judged_by_the_memory_of_the_machine() -> None:
    """Such as one that the environment names by its UUID, or that reports its memory as [N/A]: `join` tries it."""
    unknown = GpuProbe((CARD._replace(memory_bytes=None, used_bytes=None),))
    assert here(unknown, free_gb=9).why_too_large(16 * GB) == ""
    by_name = {"CUDA_VISIBLE_DEVICES": "GPU-8f2a"}
    found = measure("auto", VLLM, HostReadings(machine(), cards(1), 9 * GB, by_name))
    assert found.why_too_large(16 * GB) == ""


def test_a_machine_without_an_engine_says_so_of_every_round() -> None:
    bare = HostMachine(nvidia=False, packages=frozenset(), llama_offloads=False, find_vllm=lambda _: "none")
    found = measure_or_explain("auto", EngineOptions(), HostReadings(bare, GpuProbe(), 64 * GB, {}))
    assert found.why_too_large(GB).startswith("No installed engine can run here")


def test_slices_of_a_card_hold_no_model_together() -> None:
    slices = GpuProbe(
        tuple(
            CARD._replace(number=number, name="A100 MIG 3g.20gb", slice_uuid=f"MIG-{number}") for number in (100, 101)
        )
    )
    assert here(slices).why_too_large(28 * GB) != ""
    assert here(slices).why_too_large(16 * GB) == ""
