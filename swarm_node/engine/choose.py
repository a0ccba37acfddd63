"""Choice of the sampling engine on this machine, with the reason.

- Engines are tried in the order of `ENGINES`; the first that can run on this machine and is not slower than a later one
  is chosen.
- The check imports nothing: imports take seconds, and may take GPU memory. Only vLLM, which has its own environment, is
  started there, and only if its interpreter is configured.
- An engine that the owner selected is chosen, or refused with the reason.
- The policy is not read here: the engine's child checks whether it supports the policy. An engine that could not load
  it is unfit: with `auto`, the next one is chosen. So a policy that llama.cpp does not support goes to torch.
"""

import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from protocol.errors import ConfigInvalid
from protocol.work.lease import EXACT
from swarm_node.engine.turn_cache import TURNS_MIB
from swarm_node.engine.vllm import command
from swarm_node.machine import gpu, use

AUTO = "auto"

NONE_HERE = "No installed engine can run here."

WSL_GPU = Path("/dev/dxg")
"""The graphics card of Windows in WSL 2, where the NVIDIA driver has no file in /proc."""

NO_NVIDIA = "it is for NVIDIA cards, and this machine has none"

PROPOSED = ("vllm", "torch", "llama")
"""Engines in the order in which they are proposed for installation; llama.cpp has to be compiled."""

NONE_UNFIT: Mapping[str, str] = MappingProxyType({})


class EngineOptions(NamedTuple):
    """Engine settings of the owner."""

    threads: int = 1
    """CPU threads; 0 means `HostMachine.threads` on the CPU, and 1 with a GPU."""
    device: str = AUTO
    dtype: str = AUTO
    gpu_layers: int = -1
    vllm_python: str = ""
    """The interpreter of vLLM's environment."""
    vram_share: float = 1.0
    """Share of the GPU's memory that the engine may use."""
    turns_mib: int = TURNS_MIB
    """Memory for finished turns of episodes; vLLM has a cache of its own."""
    cards_per_engine: int = 0
    """Graphics cards of one engine; 0: one, or with vLLM as many as the round's model needs."""


TORCH_DEVICES: Mapping[tuple[str, str], str] = MappingProxyType({("amd", "rocm"): "rocm", ("intel", "xpu"): "xpu"})
"""Device of torch by the vendor of the card and the build of torch; Apple's are in every build for macOS."""


class HostMachine(NamedTuple):
    """Hardware and packages of this machine."""

    nvidia: bool
    packages: frozenset[str]
    llama_offloads: bool
    """True if llama.cpp was built for a GPU."""
    find_vllm: Callable[[str], command.VllmInstallation | str]
    """Returns the vLLM of an interpreter, or the reason why there is none; takes 15 s."""
    threads: int = 1
    """Threads of an engine that computes on the CPU."""
    driver: int = 0
    """Major version of the NVIDIA driver; 0 if unknown."""
    torch_cuda: int | None = None
    """Major version of CUDA for which torch is built; 0 for a build without CUDA, None if unknown."""
    other_card: str = ""
    """amd, intel or apple, if there is a card of this vendor that the system drives."""
    torch_build: str = ""
    """rocm or xpu, if torch is built for cards of AMD or Intel."""

    @property
    def torch_lacks_cuda(self) -> str:
        """Return why torch cannot use the NVIDIA card; empty if no reason is known."""
        if self.torch_cuda == 0:
            return "this build of torch has no CUDA"
        return gpu.outdated(self.driver, gpu.CUDA_MAJOR if self.torch_cuda is None else self.torch_cuda)

    @property
    def torch_on_cuda(self) -> bool:
        """Return True if torch computes on an NVIDIA card by default."""
        return self.nvidia and not self.torch_lacks_cuda

    @property
    def torch_device(self) -> str:
        """Return the device that torch uses by default, as classes of numerics name it."""
        if self.torch_on_cuda:
            return "cuda"
        return TORCH_DEVICES.get((self.other_card, self.torch_build), "mps" if self.other_card == "apple" else "cpu")


class EngineCandidate(NamedTuple):
    """An engine that may be chosen."""

    dtypes: frozenset[str]
    lacks: Callable[[HostMachine, EngineOptions], str]
    """Returns why it cannot run on this machine; empty if it can."""
    yields: Callable[[HostMachine, EngineOptions], str]
    """Returns why another engine is preferred, unless this one was selected; empty if none is."""
    because: Callable[[HostMachine], str]
    install: str
    """Install instructions, as part of a sentence."""
    command: Callable[[EngineOptions], list[str]]
    joins_cards: bool = False
    """True if several graphics cards can hold one model together."""


class Choice(NamedTuple):
    """An engine and its child's command line."""

    name: str
    why: str
    command: list[str]


def choose(wanted: str, options: EngineOptions, machine: HostMachine, unfit: Mapping[str, str] = NONE_UNFIT) -> Choice:
    """Return the engine to use; engines in `unfit` are excluded."""
    refused: dict[str, str] = {}
    for name, candidate in ENGINES.items():
        if wanted not in (AUTO, name):
            continue
        if name in unfit:
            lacks = unfit[name]
        elif options.cards_per_engine > 1 and not candidate.joins_cards:
            lacks = "it computes on one card; only vLLM joins cards"
        elif options.dtype in candidate.dtypes:
            lacks = candidate.lacks(machine, options)
        else:
            lacks = f"it does not support {options.dtype}, only {', '.join(sorted(candidate.dtypes - {AUTO}))}"
        if wanted == AUTO and not lacks and "torch" not in unfit:  # the engine that the others yield to
            lacks = candidate.yields(machine, options)
        if not lacks:
            why = "selected with --engine" if wanted == name else candidate.because(machine)
            others = "".join(f"; not {other}: {reason}" for other, reason in refused.items())
            resolved = options._replace(threads=threads_of(options, machine))
            return Choice(name, f"{name}: {why}{others}", candidate.command(resolved))
        refused[name] = lacks
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    if options.dtype == EXACT and machine.packages >= {"torch", "transformers"}:
        raise ConfigInvalid(
            f"{NONE_HERE} {reasons}.",
            hint="Use `--dtype exact` with `--device cpu` and `--engine auto`, or choose another `--dtype`.",
        )
    if options.cards_per_engine > 1:
        raise ConfigInvalid(
            f"--cards-per-engine {options.cards_per_engine}: {reasons}.",
            hint=f"vLLM joins cards; it takes {command.INSTALL}. Or leave --cards-per-engine out.",
        )
    if options.device in CARDS and not _has_card(machine, options.device):
        raise ConfigInvalid(
            f"--device {options.device}: this machine has no such graphics card. {reasons}.",
            hint="Leave --device out, or give --device cpu. `swarm-node doctor` shows the cards of this machine.",
        )
    if wanted != AUTO and options.dtype not in ENGINES[wanted].dtypes:
        raise ConfigInvalid(f"{NONE_HERE} {reasons}.", hint="Choose another --dtype, or another --engine.")
    other = "" if wanted == AUTO else " Or choose another --engine."
    raise ConfigInvalid(f"{NONE_HERE} {reasons}.", hint=how_to_install(list(refused), machine) + other)


def how_to_install(names: Sequence[str], machine: HostMachine) -> str:
    """Return how to install one of these engines; among several, vLLM only on a machine with an NVIDIA card."""
    useful = [name for name in PROPOSED if name in names and (name != "vllm" or machine.nvidia or len(names) == 1)]
    options = " or ".join(f"`--engine {name}`" for name in useful)
    packages = ", or ".join(ENGINES[name].install for name in useful)
    return f"Run the installer again with {options}. Without the installer: {packages}."


def _has_card(machine: HostMachine, device: str) -> bool:
    """Return True if the system drives a card that may be meant by this device of `--device`."""
    vendors = {"cuda": {"amd"}, "xpu": {"intel"}, "mps": {"apple"}}
    return machine.other_card in vendors[device] or (device == "cuda" and machine.nvidia)


def for_policy(wanted: str, options: EngineOptions, unfit: Mapping[str, str] = NONE_UNFIT) -> Choice:
    """Return the engine for a policy on this machine; `unfit` maps engines that could not load it to the reason."""
    return choose(wanted, options, this_machine(), unfit)


def threads_of(options: EngineOptions, machine: HostMachine) -> int:
    """Return the configured number of threads; by default `machine.threads` on the CPU, and 1 with a GPU."""
    on_gpu = (
        options.device != "cpu"
        and options.gpu_layers != 0
        and (machine.torch_device != "cpu" or machine.llama_offloads)
    )
    return options.threads or (1 if on_gpu else machine.threads)


def this_machine() -> HostMachine:
    """Return the hardware and packages of this machine, without importing any package."""
    packages = frozenset(name for name in ("torch", "transformers", "llama_cpp", "gguf") if find_spec(name))
    loaded = Path("/proc/driver/nvidia/version")
    nvidia = loaded.exists() or (WSL_GPU.exists() and (gpu.WSL_PROGRAMS / "nvidia-smi").exists())
    driver = gpu.driver_major(loaded.read_text(errors="replace")) if loaded.exists() else 0
    version = _version_of_torch()
    return HostMachine(
        nvidia,
        packages,
        _llama_offloads(),
        _find_vllm,
        use.default_threads(use.usable_cores()),
        driver,
        cuda_major(version),
        _other_card(),
        torch_build(version),
    )


def _other_card() -> str:
    """Return the vendor of a card that is not NVIDIA's; empty if there is none that the system drives."""
    if sys.platform == "darwin":
        return "apple" if platform.machine() == "arm64" else ""
    return next((card.vendor for card in gpu.kernel_cards()), "amd" if Path("/dev/kfd").exists() else "")


@cache  # the node asks at every version, and an environment does not change
def _find_vllm(python: str) -> command.VllmInstallation | str:
    try:
        return command.probe(python)
    except ConfigInvalid as error:
        return error.message.rstrip(".")


def _version_of_torch() -> str:
    """Return the text of the installed torch's version.py, without importing it; empty if there is none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    version = Path(spec.origin).with_name("version.py")
    return version.read_text(errors="replace") if version.is_file() else ""


def torch_build(text: str) -> str:
    """Return rocm or xpu by torch's version.py, if it is built for cards of AMD or Intel."""
    if re.search(r"^(?:hip|rocm)\b[^=\n]*=\s*['\"]", text, re.MULTILINE):
        return "rocm"
    return "xpu" if re.search(r"^xpu\b[^=\n]*=\s*['\"]", text, re.MULTILINE) else ""


def cuda_major(text: str) -> int | None:
    """Return the major version of CUDA in torch's version.py; 0 for a build without CUDA.

    Return None for the ROCm build, whose device is also called cuda.
    """
    if re.search(r"^(?:hip|rocm)\b[^=\n]*=\s*['\"]", text, re.MULTILINE):
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*(?:None|['\"](\d+)\.)", text, re.MULTILINE)
    return int(match[1] or 0) if match else None


def _llama_offloads() -> bool:
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return False
    backends = {
        file.name.partition(".")[0].removeprefix("lib") for file in (Path(spec.origin).parent / "lib").iterdir()
    }
    return bool(backends & {f"ggml-{kind}" for kind in ("cuda", "hip", "metal", "musa", "sycl", "vulkan")})


def _vllm_lacks(machine: HostMachine, options: EngineOptions) -> str:
    if not options.vllm_python:
        return "not installed (optional; `--vllm-python` is not set)" if machine.nvidia else NO_NVIDIA
    installation = machine.find_vllm(options.vllm_python)
    if isinstance(installation, str):
        return installation
    if options.device not in (AUTO, installation.device):
        return f"this vLLM runs on {installation.device}, not on {options.device}"
    if options.dtype == command.FP8 and not installation.fp8:
        return f"fp8 takes {command.FP8_CARDS}"
    if installation.device == "cpu" and options.cards_per_engine > 1:
        return "this vLLM runs on the CPU"
    return gpu.outdated(machine.driver) if installation.device == "cuda" else ""


CARDS = ("cuda", "xpu", "mps")
"""Devices of `--device` that are graphics cards; torch calls a card of AMD cuda, too."""


def _llama_lacks(machine: HostMachine, options: EngineOptions) -> str:
    if missing := sorted({"llama_cpp", "gguf"} - machine.packages):
        return f"not installed ({' and '.join(missing)} missing)"
    if options.device in CARDS and not machine.llama_offloads:
        return "this build of llama-cpp-python has no GPU"
    if options.vram_share < 1 and machine.llama_offloads and options.device != "cpu" and options.gpu_layers < 0:
        return "it cannot limit its share of the GPU's memory; use --gpu-layers instead"
    return ""


def _llama_yields(machine: HostMachine, options: EngineOptions) -> str:
    if machine.llama_offloads or _torch_lacks(machine, options):
        return ""
    if machine.torch_device != "cpu" and options.device == AUTO:
        named = "NVIDIA GPU" if machine.torch_on_cuda else "GPU, and torch does"
        return f"this build of llama-cpp-python does not use the {named}"
    return "in float32 torch is faster for many samples at once" if options.dtype in (AUTO, "float32") else ""


def _torch_lacks(machine: HostMachine, options: EngineOptions) -> str:
    missing = sorted({"torch", "transformers"} - machine.packages)
    if missing:
        return f"not installed ({' and '.join(missing)} missing)"
    device = machine.torch_device if options.device == AUTO else options.device
    if options.dtype == EXACT and device != "cpu":
        return "exact is computed on the CPU only: add `--device cpu`"
    if options.device == "cuda":
        return "" if machine.torch_device == "rocm" else machine.torch_lacks_cuda
    if options.device in CARDS and machine.torch_device != options.device:
        return f"this build of torch finds no device {options.device}"
    return ""


def _torch_because(machine: HostMachine) -> str:
    """Return why torch is chosen, and why it does not use a graphics card, if so."""
    if machine.torch_device != "cpu":
        return "torch is installed" + f" and uses the device {machine.torch_device}" * (not machine.torch_on_cuda)
    if machine.nvidia:
        return f"torch is installed; it uses the CPU because {machine.torch_lacks_cuda}"
    builds = {"amd": "ROCm", "intel": "XPU"}
    if build := builds.get(machine.other_card):
        return f"torch is installed; it uses the CPU because this build of torch has no {build}"
    return "torch is installed"


def _own_command(name: str, options: EngineOptions) -> list[str]:
    """Return the command of an engine child, by the console script next to this interpreter."""
    script = str(Path(sys.executable).with_name("swarm-node"))
    words = [script, "engine", "--engine", name, "--threads", str(options.threads)]
    words += ["--device", options.device, "--dtype", options.dtype, "--gpu-layers", str(options.gpu_layers)]
    return [*words, "--vram-share", str(options.vram_share), "--turns-mib", str(options.turns_mib)]


ENGINES = {
    "vllm": EngineCandidate(
        dtypes=frozenset({AUTO, "float32", "bfloat16", command.FP8}),
        lacks=_vllm_lacks,
        yields=lambda _machine, _options: "",
        because=lambda _machine: "vLLM works in the environment of --vllm-python",
        install=command.INSTALL,
        command=lambda options: command.command(
            options.vllm_python, options.threads, options.dtype, options.vram_share, max(1, options.cards_per_engine)
        ),
        joins_cards=True,
    ),
    "llama": EngineCandidate(
        dtypes=frozenset({AUTO, "float32", "float16", "bfloat16", "q8_0"}),
        lacks=_llama_lacks,
        yields=_llama_yields,
        because=lambda machine: "llama-cpp-python is installed" + " and uses the GPU" * machine.llama_offloads,
        install="`pip install 'echo-swarm[llama]'`",
        command=lambda options: _own_command("llama", options),
    ),
    "torch": EngineCandidate(
        dtypes=frozenset({AUTO, "float32", "bfloat16", EXACT}),
        lacks=_torch_lacks,
        yields=lambda _machine, _options: "",
        because=_torch_because,
        install="`pip install 'echo-swarm[torch]'`",
        command=lambda options: _own_command("torch", options),
    ),
}
"""Engines by preference."""
