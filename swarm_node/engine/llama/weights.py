"""A policy's tensors in llama.cpp's form: its names, its types, and a GGUF file of them.

- Matrices are stored in the type asked for, or in F16 where a row does not divide into blocks; vectors, norms, biases
  and the matrices that choose experts in float32.
- gguf's own map gives the names. The experts of a layer become one tensor; `recipes` lists other differences.
- The engine's file has no vocabulary: only token ids go in and out.
- Tensors are read and encoded one by one, and copied unchanged if the policy already has the target type.

The weights of a policy in llama.cpp (`LlamaModel`) can be overwritten in place.

- The first load goes through a GGUF file, which is deleted afterwards: weights are read into memory, not mapped.
- A swap encodes and writes only the tensors that differ from the current ones.
- If not all weights were found in memory (see `ggml`), every version is loaded anew.
"""

import ctypes
import json
import logging
import math
import mmap
import re
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from protocol.policy import adapter, tensors
from protocol.policy.rounding import dithered
from swarm_node.engine.llama.ggml import Q8_BLOCK, Bytes, Type, Weight, encode, encoded_bytes, watching
from swarm_node.engine.llama.llama_config import LlamaConfig
from swarm_node.engine.llama.recipes import Change, Recipe, constants, recipe_of, write_fields
from swarm_node.engine.policy_files import read_adapter, tensor_files

_TYPE_OF = {"F32": Type.F32, "F16": Type.F16, "BF16": Type.BF16}
"""Storage types by the type names in a policy's files."""


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of llama.cpp, and the policy's tensors that it contains: one, or those of all experts in order."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    kind: Type
    change: Change | None = None
    stacked: bool = False

    @property
    def size_bytes(self) -> int:
        return encoded_bytes(math.prod(self.shape), self.kind)

    def digest(self, given: "Mapping[str, SourceTensor]") -> bytes:
        """Return a digest of the values."""
        return b"".join(given[name].digest() for name in self.sources)

    def encoded(self, given: "Mapping[str, SourceTensor]") -> Bytes:
        """Return the values as ggml stores them."""
        parts = [given[name].encoded(self.kind, self.change) for name in self.sources]
        return np.stack(parts) if self.stacked else parts[0]


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the policy, mapped into memory."""

    kind: Type
    shape: tuple[int, ...]
    data: memoryview
    added: "Adapter | None" = None

    def digest(self) -> bytes:
        """Return a digest of the values, including the adapter."""
        hasher = blake3(self.data)
        if self.added is not None:
            for part in (self.added.down, self.added.up):
                hasher.update(part.data)
            hasher.update(np.float64(self.added.scale).tobytes())
        return hasher.digest()

    def encoded(self, kind: Type, change: Change | None = None) -> Bytes:
        """Return the values in type `kind`; the last axis holds the bytes of a row."""
        if self.added is not None:
            return self._merged(self.added).encoded(kind, change)
        if kind == self.kind and change is None:
            return np.frombuffer(self.data, np.uint8).reshape(*self.shape[:-1], -1)
        values = self._values().reshape(self.shape)
        return encode(np.ascontiguousarray(values if change is None else change(values)), kind)

    def _merged(self, added: "Adapter") -> "SourceTensor":
        """Return the tensor plus the adapter, as in `protocol.policy.adapter`: in float32, then in the stored type."""
        down, up = (part._values().reshape(part.shape) for part in (added.down, added.up))
        values = self._values().reshape(self.shape) + np.float32(added.scale) * (up @ down)
        stored = dithered(added.name, values) if self.kind == Type.BF16 else encode(values, self.kind)
        return SourceTensor(self.kind, self.shape, stored.reshape(-1).view(np.uint8).data)

    def _values(self) -> NDArray[np.float32]:
        if self.kind == Type.BF16:
            return (np.frombuffer(self.data, "<u2").astype(np.uint32) << 16).view(np.float32)
        return np.frombuffer(self.data, "<f4" if self.kind == Type.F32 else "<f2").astype(np.float32, copy=False)


@dataclass(frozen=True)
class Adapter:
    """Low-rank product that is added to a tensor."""

    name: str
    """The tensor's."""
    down: SourceTensor
    up: SourceTensor
    scale: float


_EXPERT = re.compile(r"(?P<stem>.+\.experts)\.(?P<number>\d+)(?P<rest>\..+)")

_EXACT = ("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight")
"""Matrices that llama.cpp needs in float32."""


def places(recipe: Recipe, config: LlamaConfig, kind: Type, given: Mapping[str, "SourceTensor"]) -> list[TensorPlace]:
    """Return every tensor of llama.cpp for a policy; raise an error that names tensors it does not support."""
    names = gguf.get_tensor_name_map(recipe.arch, config.layers)
    result, unknown = list[TensorPlace](), list[str]()
    for name, sources in _gathered(given).items():
        if config.tied and name == "lm_head.weight":
            continue
        made = next((made for rule in recipe.rules if (made := rule(config, name)) is not None), [(name, None)])
        for own, change in made:
            # gguf has BLOOM's names only without the prefix that transformers added later.
            known = (names.get_name(stem, (".weight", ".bias")) for stem in (own, own.removeprefix("transformer.")))
            if (short := next(filter(None, known), None)) is None:
                unknown.append(own)
                continue
            result.append(_place(short, name, sources, given, kind, change))
    if unknown:
        raise config.refusal(f"llama.cpp has no tensors for {', '.join(unknown[:3])}")
    return result


def _place(
    short: str, name: str, sources: list[str], given: Mapping[str, "SourceTensor"], kind: Type, change: Change | None
) -> TensorPlace:
    shapes = {given[source].shape for source in sources}
    if len(shapes) > 1:
        raise ValueError(f"the experts of {name} differ in shape")
    shape, stacked = shapes.pop(), sources != [name]
    if change is not None:
        shape = change(np.broadcast_to(np.float32(0), shape)).shape
    whole = (len(sources), *shape) if stacked else shape
    return TensorPlace(short, tuple(sources), whole, _kind(short, whole, kind), change, stacked)


def _gathered(given: Iterable[str]) -> dict[str, list[str]]:
    """Return the tensors by name, with those of a layer's experts under one name."""
    parts_of: dict[str, dict[int, str]] = {}
    for name in given:
        if (expert := _EXPERT.fullmatch(name)) is None:
            parts_of[name] = {0: name}
        else:
            parts_of.setdefault(expert["stem"] + expert["rest"], {})[int(expert["number"])] = name
    return {name: [parts[number] for number in sorted(parts)] for name, parts in parts_of.items()}


def _kind(name: str, sizes: tuple[int, ...], wanted: Type) -> Type:
    if len(sizes) == 1 or not name.endswith(".weight") or name.endswith(_EXACT):
        return Type.F32
    return Type.F16 if wanted == Type.Q8_0 and sizes[-1] % Q8_BLOCK else wanted


def sources(folder: Path) -> dict[str, SourceTensor]:
    """Return the tensors of a policy's files by name; a file stays mapped while one of its tensors is referenced."""
    known, scale = _sources(tensor_files(folder)), read_adapter(folder)
    if scale is None:
        return known
    matrices = _sources([folder / adapter.WEIGHTS])
    for name in adapter.adapted(matrices):
        down, up = (matrices[part] for part in adapter.names(name))
        if name not in known or (up.shape[:1] + down.shape[1:], up.shape[1:]) != (known[name].shape, down.shape[:1]):
            raise ValueError(f"the adapter's matrices do not fit {name}")
        known[name] = replace(known[name], added=Adapter(name, down, up, scale))
    return known


def _sources(parts: Iterable[Path]) -> dict[str, SourceTensor]:
    by_name: dict[str, SourceTensor] = {}
    for part in parts:
        with part.open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        header = tensors.header_of(view)
        described = json.loads(header[tensors.PREFIX_BYTES :])
        for tensor in tensors.layout(header, len(view)):
            if tensor.name in by_name:
                raise ValueError(f"two files hold {tensor.name}")
            entry = described[tensor.name]
            source = SourceTensor(_TYPE_OF[entry["dtype"]], tuple(entry["shape"]), view[tensor.begin : tensor.end])
            if math.prod(source.shape) * tensor.element_bytes != len(source.data):
                raise ValueError(f"{tensor.name} has another size than its shape says")
            by_name[tensor.name] = source
    return by_name


def misfits(wanted: Iterable[TensorPlace], given: Iterable[TensorPlace]) -> list[str]:
    """Return the names of tensors that are missing, unexpected, or of another shape."""
    shapes, other = ({place.name: (place.sources, place.shape) for place in places} for places in (wanted, given))
    return sorted(name for name in shapes.keys() | other.keys() if shapes.get(name) != other.get(name))


def without_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Write that there is no tokenizer."""
    writer.add_tokenizer_model("none")


def write_gguf(
    file: Path,
    recipe: Recipe,
    config: LlamaConfig,
    wanted: Sequence[TensorPlace],
    given: Mapping[str, SourceTensor],
    describe: Callable[[gguf.GGUFWriter], None] = without_vocabulary,
) -> None:
    """Write a model that llama.cpp can load; `describe` adds further fields."""
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[recipe.arch])
    width = next((place.shape[-1] for place in wanted if place.name.endswith(".ffn_down.weight")), None)
    write_fields(recipe, config, width, writer)
    describe(writer)
    fixed = constants(config)
    for place in wanted:
        kind = gguf.GGMLQuantizationType(place.kind)
        writer.add_tensor_info(place.name, place.shape, np.dtype(np.float32), place.size_bytes, kind)
    for name, values in fixed.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for place in wanted:
        writer.write_tensor_data(place.encoded(given))
    for values in fixed.values():
        writer.write_tensor_data(values)
    writer.close()


log = logging.getLogger(__name__)

_ERROR = 4
"""ggml's messages at lower levels are not useful."""


def _log(level: int, text: bytes, _data: int | None) -> None:
    if level == _ERROR:
        log.error("%s", text.decode(errors="replace").rstrip())


_LOG = llama_cpp.llama_log_callback(_log)


def quieten() -> None:
    """Make llama.cpp report only its errors, to our log."""
    llama_cpp.llama_log_set(_LOG, ctypes.c_void_p(0))


class LlamaModel:
    """The weights of one policy; `pointer` is llama.cpp's own."""

    def __init__(self, folder: Path, config: dict[str, Any], kind: Type, gpu_layers: int) -> None:
        quieten()
        llama_cpp.llama_backend_init()
        self._recipe, self._config = recipe_of(config)
        self.vocabulary, self.positions = self._config.vocabulary, self._config.positions
        self.is_exact = kind == Type.F32 and self._recipe.is_exact
        self._kind = kind
        given = sources(folder)
        self._places = places(self._recipe, self._config, kind, given)
        with tempfile.TemporaryDirectory(prefix="echo-swarm-") as scratch:
            file = Path(scratch) / "policy.gguf"
            write_gguf(file, self._recipe, self._config, self._places, given)
            self.pointer = _load(file, gpu_layers)
        weakref.finalize(self, llama_cpp.llama_model_free, self.pointer)
        self.parameters = sum(math.prod(place.shape) for place in self._places)
        self._digests = {place.name: place.digest(given) for place in self._places}
        self._weights = self._find()

    def swap(self, folder: Path) -> bool:
        """Write the tensors that differ in another version; return False, and write nothing, if the shapes differ."""
        given = sources(folder)
        if not self._weights:
            return False
        if misfits(self._places, places(self._recipe, self._config, self._kind, given)):
            return False
        for place in self._places:
            if (digest := place.digest(given)) != self._digests[place.name]:
                self._weights[place.name].write(np.ascontiguousarray(place.encoded(given)))
                self._digests[place.name] = digest
        return True

    def _find(self) -> dict[str, Weight]:
        """Return every weight by name; empty if any weight is not found."""
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = 32
        with watching(parameters) as weights_by_name:
            context = llama_cpp.llama_init_from_model(self.pointer, parameters)
            if not context:
                raise MemoryError
            token = (llama_cpp.llama_token * 1)(0)
            failed = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(token, 1))
            llama_cpp.llama_free(context)
        missing = [
            place.name for place in self._places
            if place.name not in weights_by_name or not weights_by_name[place.name].fits(place.size_bytes)
        ]  # fmt: skip
        if failed or missing:
            log.warning("weights cannot be swapped in place, every version is loaded anew: %s", missing[:5])
            return {}
        return weights_by_name


def _load(file: Path, gpu_layers: int) -> Any:
    parameters = llama_cpp.llama_model_default_params()
    parameters.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    parameters.n_gpu_layers = gpu_layers
    model = llama_cpp.llama_model_load_from_file(bytes(file), parameters)
    if not model:
        raise ValueError("llama.cpp does not load it; the log says why")
    return model
