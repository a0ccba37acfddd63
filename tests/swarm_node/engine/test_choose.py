"""The choice of an engine for each machine, and the reason that is given."""

import sys

import pytest

from protocol.errors import ConfigInvalid
from swarm_node.engine.choose import (
    EngineOptions,
    HostMachine,
    choose,
    cuda_major,
    this_machine,
    threads_of,
    torch_build,
)
from swarm_node.engine.precision import device_of
from swarm_node.engine.vllm.command import VllmInstallation

BOTH = frozenset({"torch", "transformers", "llama_cpp", "gguf"})
TORCH = frozenset({"torch", "transformers"})
LLAMA = frozenset({"llama_cpp", "gguf"})
VLLMS: dict[str, VllmInstallation | str] = {
    "/vllm/python": VllmInstallation("0.32.0", "cuda"),
    "/older/card/python": VllmInstallation("0.32.0", "cuda", fp8=False),
    "/broken/python": "it has no module vllm",
}
"""Installations of vLLM by interpreter; another one, or none, must not be asked for."""


def machine(packages: frozenset[str], *, nvidia: bool = False, llama_offloads: bool = False) -> HostMachine:
    return HostMachine(nvidia, packages, llama_offloads, VLLMS.__getitem__)


@pytest.mark.parametrize(
    ("here", "options", "name", "why"),
    [
        (machine(BOTH), EngineOptions(), "torch", "not llama: in float32 torch is faster"),
        (machine(BOTH), EngineOptions(dtype="bfloat16"), "llama", "llama: llama-cpp-python is installed"),
        (machine(LLAMA), EngineOptions(), "llama", "llama: llama-cpp-python is installed"),
        (machine(TORCH), EngineOptions(), "torch", "not llama: not installed (gguf and llama_cpp missing)"),
        (machine(BOTH, nvidia=True), EngineOptions(), "torch", "does not use the NVIDIA GPU"),
        (machine(BOTH, nvidia=True), EngineOptions(dtype="bfloat16", device="cpu"), "llama", "installed"),
        (machine(BOTH, nvidia=True, llama_offloads=True), EngineOptions(), "llama", "uses the GPU"),
        (machine(LLAMA, nvidia=True), EngineOptions(), "llama", "installed"),
        (machine(BOTH), EngineOptions(device="cuda"), "torch", "has no GPU"),
        (machine(BOTH), EngineOptions(), "torch", "not vllm: it is for NVIDIA cards, and this machine has none"),
        (machine(BOTH, nvidia=True), EngineOptions(), "torch", "not vllm: not installed (optional; `--vllm-python` is"),
        (machine(BOTH), EngineOptions(vllm_python="/vllm/python"), "vllm", "vLLM works in the environment of"),
        (machine(BOTH), EngineOptions(vllm_python="/broken/python"), "torch", "not vllm: it has no module vllm"),
        (machine(BOTH), EngineOptions(device="cpu", vllm_python="/vllm/python"), "torch", "runs on cuda, not on cpu"),
        (machine(LLAMA), EngineOptions(dtype="q8_0", vllm_python="/unasked"), "llama", "does not support q8_0"),
    ],
)
def test_the_first_engine_that_fits_is_taken(here: HostMachine, options: EngineOptions, name: str, why: str) -> None:
    choice = choose("auto", options, here)
    assert choice.name == name
    assert why in choice.why
    assert "\n" not in choice.why
    assert choice.command[choice.command.index("--engine") + 1] == name


@pytest.mark.parametrize(
    ("here", "options", "threads"),
    [
        (machine(TORCH), EngineOptions(threads=0), 4),
        (machine(TORCH), EngineOptions(threads=7), 7),
        (machine(TORCH, nvidia=True), EngineOptions(threads=0), 1),
        (machine(TORCH, nvidia=True), EngineOptions(threads=6), 6),
        (machine(TORCH, nvidia=True), EngineOptions(threads=0, device="cpu"), 4),
        (machine(LLAMA, llama_offloads=True), EngineOptions(threads=0), 1),
        (machine(LLAMA, llama_offloads=True), EngineOptions(threads=0, gpu_layers=0), 4),
        (machine(BOTH), EngineOptions(threads=0, vllm_python="/vllm/python", device="cuda"), 1),
    ],
    ids=["processor", "as said", "beside a GPU", "said, beside a GPU", "not on the GPU", "Metal", "none there", "vllm"],
)
def test_several_threads_where_the_processor_computes_and_one_beside_a_gpu(
    here: HostMachine, options: EngineOptions, threads: int
) -> None:
    command = choose("auto", options, here._replace(threads=4, nvidia=here.nvidia or options.device == "cuda")).command
    assert command[command.index("--threads") + 1] == str(threads)


def test_a_precision_that_only_one_engine_has_chooses_it() -> None:
    here = machine(BOTH, nvidia=True, llama_offloads=True)
    assert choose("auto", EngineOptions(dtype="q8_0"), here).name == "llama"
    with pytest.raises(ConfigInvalid, match="does not support q8_0, only bfloat16, exact, float32") as refused:
        choose("torch", EngineOptions(dtype="q8_0"), here)
    assert refused.value.hint == "Choose another --dtype, or another --engine."


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_exact_is_refused_on_a_card_with_the_next_step(device: str) -> None:
    here = machine(BOTH, nvidia=True)
    with pytest.raises(ConfigInvalid, match="exact is computed on the CPU only: add `--device cpu`") as refused:
        choose("auto", EngineOptions(dtype="exact", device=device), here)
    assert "`--dtype exact` with `--device cpu`" in refused.value.hint
    assert choose("auto", EngineOptions(dtype="exact", device="cpu"), here).name == "torch"
    assert choose("auto", EngineOptions(dtype="exact"), machine(BOTH)).name == "torch"


def test_a_named_engine_is_taken_or_refused_with_what_it_lacks() -> None:
    assert choose("torch", EngineOptions(), machine(BOTH)).why == "torch: selected with --engine"
    assert choose("llama", EngineOptions(), machine(BOTH, nvidia=True)).why == "llama: selected with --engine"
    with pytest.raises(ConfigInvalid, match=r"llama: not installed \(gguf and llama_cpp missing\)") as refused:
        choose("llama", EngineOptions(), machine(TORCH))
    assert "echo-swarm[llama]" in refused.value.hint
    assert "echo-swarm[torch]" not in refused.value.hint


def test_vllm_by_name_is_taken_or_refused_with_what_it_lacks() -> None:
    choice = choose("vllm", EngineOptions(vllm_python="/vllm/python"), machine(BOTH))
    assert (choice.why, choice.command[0]) == ("vllm: selected with --engine", "/vllm/python")
    with pytest.raises(ConfigInvalid, match="vllm: not installed") as refused:
        choose("vllm", EngineOptions(), machine(BOTH, nvidia=True))
    assert "pip install vllm" in refused.value.hint
    with pytest.raises(ConfigInvalid, match="vllm: it has no module vllm"):
        choose("vllm", EngineOptions(vllm_python="/broken/python"), machine(BOTH))


def test_an_interpreter_is_really_asked_for_its_vllm_and_once_only() -> None:
    first, second = this_machine(), this_machine()
    reason = first.find_vllm(sys.executable)
    assert isinstance(reason, str)
    assert reason == f"No vLLM works under {sys.executable}: ModuleNotFoundError: No module named 'vllm'"
    assert second.find_vllm(sys.executable) is reason
    assert first.find_vllm("/no/python") == "`--vllm-python /no/python` does not run: No such file or directory"


@pytest.mark.parametrize(("nvidia", "proposed"), [(True, ["vllm", "torch", "llama"]), (False, ["torch", "llama"])])
def test_with_nothing_installed_the_engines_of_this_machine_are_proposed(nvidia: bool, proposed: list[str]) -> None:
    with pytest.raises(ConfigInvalid, match="No installed engine can run here") as refused:
        choose("auto", EngineOptions(), machine(frozenset(), nvidia=nvidia))
    hint = refused.value.hint
    assert hint.startswith(f"Run the installer again with {' or '.join(f'`--engine {name}`' for name in proposed)}. ")
    assert "pip install 'echo-swarm[torch]'" in hint
    assert ("pip install vllm" in hint) == nvidia


OLD = machine(BOTH, nvidia=True)._replace(driver=550, torch_cuda=13)
WITHOUT_CUDA = machine(BOTH, nvidia=True)._replace(driver=580, torch_cuda=0)
TOO_OLD = "CUDA 13 needs NVIDIA driver 580 or newer, and this machine has 550"


@pytest.mark.parametrize(
    ("here", "reason"), [(OLD, TOO_OLD), (WITHOUT_CUDA, "this build of torch has no CUDA")], ids=["driver", "build"]
)
def test_a_torch_that_cannot_use_the_card_is_refused_for_it_and_else_says_why_it_leaves_it_idle(
    here: HostMachine, reason: str
) -> None:
    with pytest.raises(ConfigInvalid, match=reason):
        choose("torch", EngineOptions(device="cuda"), here)
    assert f"it uses the CPU because {reason}" in choose("auto", EngineOptions(), here).why
    assert "processor, since" not in choose("auto", EngineOptions(), here._replace(driver=580, torch_cuda=13)).why
    assert threads_of(EngineOptions(threads=0), here._replace(threads=6)) == 6


def test_a_vllm_whose_cuda_the_driver_does_not_run_gives_way_before_it_is_started() -> None:
    found = choose("auto", EngineOptions(vllm_python="/vllm/python"), OLD)
    assert found.name == "torch"
    assert f"not vllm: {TOO_OLD}" in found.why
    with pytest.raises(ConfigInvalid, match="580"):
        choose("vllm", EngineOptions(vllm_python="/vllm/python"), OLD)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None", 13),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None", 0),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43484'", None),
        ("git_version = 'cf30153'", None),
    ],
    ids=["CUDA", "processor", "ROCm", "another form"],
)
def test_the_cuda_of_torch_is_read_without_importing_it(line: str, expected: int | None) -> None:
    assert cuda_major(f"__all__ = ['__version__', 'cuda', 'hip']\n{line}\n") == expected


def other(card: str, build: str = "", *, offloads: bool = False) -> HostMachine:
    """A machine with a card that is not NVIDIA's."""
    return machine(BOTH, llama_offloads=offloads)._replace(other_card=card, torch_build=build, torch_cuda=0, threads=4)


@pytest.mark.parametrize(
    ("here", "device", "why"),
    [
        (other("amd", "rocm"), "rocm", "torch is installed and uses the device rocm"),
        (other("amd"), "cpu", "it uses the CPU because this build of torch has no ROCm"),
        (other("intel", "xpu"), "xpu", "torch is installed and uses the device xpu"),
        (other("intel"), "cpu", "it uses the CPU because this build of torch has no XPU"),
        (other("apple"), "mps", "torch is installed and uses the device mps"),
        (other("", "rocm"), "cpu", "torch: torch is installed"),
    ],
)
def test_the_card_of_every_vendor_is_used_by_the_torch_that_is_built_for_it(
    here: HostMachine, device: str, why: str
) -> None:
    choice = choose("auto", EngineOptions(threads=0), here)
    assert (choice.name, here.torch_device) == ("torch", device)
    assert device_of("torch", EngineOptions(), here) == device
    assert why in choice.why
    assert threads_of(EngineOptions(threads=0), here) == (4 if device == "cpu" else 1)


def test_a_llama_built_for_a_card_is_preferred_whoever_made_the_card() -> None:
    choice = choose("auto", EngineOptions(), other("amd", "rocm", offloads=True))
    assert (choice.name, "uses the GPU" in choice.why) == ("llama", True)


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_without_a_card_no_package_is_proposed_for_a_device_that_needs_one(device: str) -> None:
    here = machine(BOTH)._replace(torch_cuda=0)
    with pytest.raises(ConfigInvalid, match=f"--device {device}: this machine has no such graphics card") as refused:
        choose("auto", EngineOptions(device=device), here)
    assert "pip install" not in refused.value.hint


def test_one_engine_is_not_one_of_several() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        choose("llama", EngineOptions(), machine(TORCH))
    assert refused.value.hint == (
        "Run the installer again with `--engine llama`. Without the installer: `pip install 'echo-swarm[llama]'`. "
        "Or choose another --engine."
    )


def test_a_device_that_torch_does_not_find_is_refused() -> None:
    for device in ("xpu", "mps"):
        with pytest.raises(ConfigInvalid, match=f"finds no device {device}"):
            choose("torch", EngineOptions(device=device), other("amd", "rocm"))
    assert choose("torch", EngineOptions(device="cuda"), other("amd", "rocm")).name == "torch"
    with pytest.raises(ConfigInvalid, match="has no GPU"):
        choose("llama", EngineOptions(device="mps"), other("apple"))


@pytest.mark.parametrize(
    ("line", "build"),
    [
        ("hip: Optional[str] = None\nrocm: Optional[str] = '7.2.0'\nxpu: Optional[str] = None", "rocm"),
        ("hip: Optional[str] = None\nxpu: Optional[str] = '20250302'", "xpu"),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\nxpu: Optional[str] = None", ""),
        ("", ""),
    ],
)
def test_the_build_of_torch_is_read_without_importing_it(line: str, build: str) -> None:
    assert torch_build(f"__all__ = ['__version__', 'cuda', 'hip', 'rocm', 'xpu']\n{line}\n") == build


def test_only_vllm_takes_several_cards_for_one_engine() -> None:
    several = EngineOptions(vllm_python="/vllm/python", cards_per_engine=2)
    command = choose("auto", several, machine(BOTH, nvidia=True)).command
    assert command[command.index("--cards") + 1] == "2"
    assert "--cards" not in choose("torch", EngineOptions(), machine(BOTH)).command
    for wanted, options in (("torch", several), ("auto", several._replace(vllm_python=""))):
        with pytest.raises(ConfigInvalid, match=r"--cards-per-engine 2: .*only vLLM joins cards") as refused:
            choose(wanted, options, machine(BOTH, nvidia=True))
        assert "pip install vllm" in refused.value.hint


def test_fp8_is_computed_by_vllm_alone_and_only_where_the_card_can() -> None:
    here = machine(BOTH, nvidia=True)
    with pytest.raises(ConfigInvalid, match=r"fp8 takes a card of compute capability 8\.9"):
        choose("auto", EngineOptions(dtype="fp8", vllm_python="/older/card/python"), here)
    with pytest.raises(ConfigInvalid, match="torch: it does not support fp8"):
        choose("auto", EngineOptions(dtype="fp8"), here)
    found = choose("auto", EngineOptions(dtype="fp8", vllm_python="/vllm/python"), here)
    assert found.command[found.command.index("--dtype") + 1] == "fp8"
