"""The small files of a policy folder, which describe its tensors and its tokenizer; read without torch.

- A folder with an unknown kind of file, or a configuration that names code, is refused before any library reads it: so
  safety does not depend on their defaults.
- So is a configuration that describes more than the folder's tensors hold (`protocol.policy.model_config`).

Each use of a tokenizer has limits of memory and time.

- A tokenizer.json is a program: a few nested replacement rules turn six characters into a billion, and some patterns
  never end. `tokenizers` holds the GIL meanwhile, so no thread of this process could stop it.
- The kernel stops it. If a use takes `MEMORY_MAX_BYTES` more than the process had, or `CPU_MAX_S` of CPU time, the
  child ends; the agent continues, and reports the version of the tokenizer.
- CPU time, so that a busy or sleeping machine does not make a tokenizer look hostile.
- Only Linux counts private memory (`RLIMIT_DATA`); on other systems only the agent's watch limits it (`memory`).
"""

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol import limits
from protocol.errors import EngineFailed, PatchInvalid
from protocol.policy import adapter, model_config, tensors
from protocol.policy.codec import PolicyCodec
from protocol.policy.manifest import POLICY_SUFFIXES
from protocol.work.rollout import pack_tokens
from swarm_node.engine.memory import growth_limited

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The names of the number of experts in the config.json of different architectures."""

PolicyFiles = frozenset[tuple[str, int, int, int, int]]
"""The name, device, number, size and time of change of each file of a policy folder."""


def files_of(folder: Path) -> PolicyFiles:
    """Return the identity of each file of a folder; a replaced or changed file has another one. No file is read."""
    stats = [(file.name, file.stat()) for file in folder.iterdir()]
    return frozenset((name, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns) for name, at in stats)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json; the folder may hold only numbers and text."""
    for file in sorted(folder.iterdir()):
        if file.suffix not in POLICY_SUFFIXES:
            raise ValueError(f"{file.name} is neither numbers nor text")
    config = _read_object(folder / "config.json")
    model_config.require_plain(config)
    return config


def has_experts(config: dict[str, Any]) -> bool:
    """Return True if a policy with this config.json is a mixture of experts."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    return any(isinstance(part.get(name), int) and part[name] > 1 for part in parts for name in EXPERT_COUNTS)


def require_layers(folder: Path, config: dict[str, Any]) -> None:
    """Refuse a configuration with more layers than the folder has tensors for."""
    model_config.require_layers(config, sum(map(_count, tensor_files(folder))))


def require_borne_out(folder: Path, parameters: int) -> None:
    """Refuse a model with more parameters than the folder's tensors can hold."""
    model_config.require_borne_out(parameters, sum(file.stat().st_size for file in tensor_files(folder)))


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the contents of generation_config.json; empty if the policy has none."""
    file = folder / "generation_config.json"
    return _read_object(file) if file.exists() else {}


def read_adapter(folder: Path) -> float | None:
    """Return the scale of the adapter in this folder; None if there is no adapter."""
    file = folder / adapter.CONFIG
    return adapter.scale(file.read_bytes()) if file.exists() else None


def tensor_files(folder: Path) -> list[Path]:
    """Return the files with the policy's own tensors, without the adapter; at least one."""
    parts = sorted(path for path in folder.glob("*.safetensors") if path.name != adapter.WEIGHTS)
    if not parts:
        raise ValueError("there is no *.safetensors file")
    return parts


def _count(file: Path) -> int:
    """Return the number of tensors in a file, by its header."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            prefix = opened.read(tensors.PREFIX_BYTES)
            length = min(int.from_bytes(prefix, "little"), limits.TENSORS_HEADER_MAX_BYTES)
            header = tensors.header_of(memoryview(prefix + opened.read(length)))
        return len(tensors.layout(header, size))
    except PatchInvalid as error:
        raise ValueError(f"{file.name}: {error.message}") from None


def _read_object(file: Path) -> dict[str, Any]:
    if file.stat().st_size > limits.POLICY_CONFIG_MAX_BYTES:
        raise ValueError(f"{file.name} is larger than {limits.POLICY_CONFIG_MAX_BYTES} bytes")
    try:
        value = json.loads(file.read_bytes())
    except RecursionError:
        raise ValueError(f"{file.name} is nested without end") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} is no object")
    return value


MEMORY_MAX_BYTES = 1024 * limits.MIB
"""A tokenizer of 28 MB, with 250,000 tokens, takes 300 MB while it is loaded."""

CPU_MAX_S = 10.0
"""The limit of CPU time: that tokenizer is loaded in 0.7 s, and no text of a task takes a tenth of that."""

TOKENIZER = "tokenizer.json"


@contextmanager
def limited(what: str) -> Iterator[None]:
    """Let the kernel end this process if the block exceeds the limits; raise library errors as `EngineFailed`."""
    try:
        with growth_limited(MEMORY_MAX_BYTES):
            signal.setitimer(signal.ITIMER_PROF, CPU_MAX_S)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no `Exception`
        raise EngineFailed(f"The policy's {TOKENIZER} {what}: {error!r}"[:300]) from error


def encode(folder: Path, texts: Sequence[str]) -> tuple[bytes, ...]:
    """Return the packed tokens of each text, by the tokenizer of a policy folder."""
    with limited("cannot be used"):
        size_bytes = (folder / TOKENIZER).stat().st_size
        if size_bytes > limits.TOKENIZER_MAX_BYTES:
            raise ValueError(f"it has {size_bytes} bytes, and {limits.TOKENIZER_MAX_BYTES} are allowed")
        data = (folder / TOKENIZER).read_bytes()
        model_config.require_tokenizer(data)
        codec = PolicyCodec(data.decode())
    return tuple(_encoded(codec, text) for text in texts)


def _encoded(codec: PolicyCodec, text: str) -> bytes:
    with limited("cannot encode a text"):
        tokens = codec.encode(text)
    return _packed(tokens)


def _packed(tokens: list[int]) -> bytes:
    if not 1 <= len(tokens) <= limits.TOKENS_MAX:
        raise EngineFailed(
            f"The policy's tokenizer makes {len(tokens)} tokens of a short text; 1 to {limits.TOKENS_MAX} can be used."
        )
    return pack_tokens(tokens)
