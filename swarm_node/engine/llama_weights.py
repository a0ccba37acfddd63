"""A Qwen3's tensors as llama.cpp wants them: its names, its types, and a GGUF file of them.

- Matrices are stored in the type asked for, or in F16 where a row does not divide into blocks; vectors in float32.
- The file has no vocabulary: nothing but token ids ever goes in or out.
- Tensors are read and encoded one by one, and copied unchanged where the policy's type is the one wanted.
"""

import json
import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from protocol import adapter, tensors
from swarm_node.engine.llama_ggml import Q8_BLOCK, Bytes, Type, encode, encoded_bytes
from swarm_node.engine.policy_files import read_adapter, tensor_files
from swarm_node.engine.qwen3_shape import Shape

_TYPE_OF = {"F32": Type.F32, "F16": Type.F16, "BF16": Type.BF16}
"""Of what the files of a policy may hold."""


@dataclass(frozen=True)
class Place:
    """Where a tensor of the policy belongs."""

    name: str
    shape: tuple[int, ...]
    kind: Type

    @property
    def size_bytes(self) -> int:
        return encoded_bytes(math.prod(self.shape), self.kind)


@dataclass(frozen=True)
class Source:
    """A tensor of the policy, mapped into memory."""

    kind: Type
    shape: tuple[int, ...]
    data: memoryview
    added: "Adapter | None" = None

    def digest(self) -> bytes:
        """What tells a changed tensor from one that is the same."""
        hasher = blake3(self.data)
        if self.added is not None:
            for part in (self.added.down, self.added.up):
                hasher.update(part.data)
            hasher.update(np.float64(self.added.scale).tobytes())
        return hasher.digest()

    def encoded(self, kind: Type) -> Bytes:
        """Its values in this type; the last axis holds the bytes of a row."""
        if self.added is not None:
            return self._merged(self.added).encoded(kind)
        if kind == self.kind:
            return np.frombuffer(self.data, np.uint8).reshape(*self.shape[:-1], -1)
        return encode(self._values().reshape(self.shape), kind)

    def _merged(self, added: "Adapter") -> "Source":
        """As `protocol.adapter` defines it: in float32, then in the type in which it is stored."""
        down, up = (part._values().reshape(part.shape) for part in (added.down, added.up))
        values = self._values().reshape(self.shape) + np.float32(added.scale) * (up @ down)
        return Source(self.kind, self.shape, encode(values, self.kind).reshape(-1).data)

    def _values(self) -> NDArray[np.float32]:
        if self.kind == Type.BF16:
            return (np.frombuffer(self.data, "<u2").astype(np.uint32) << 16).view(np.float32)
        return np.frombuffer(self.data, "<f4" if self.kind == Type.F32 else "<f2").astype(np.float32, copy=False)


@dataclass(frozen=True)
class Adapter:
    """What is added to a tensor."""

    down: Source
    up: Source
    scale: float


def places(shape: Shape, kind: Type) -> dict[str, Place]:
    """Every tensor of such a policy, by its own name."""
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    outer: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens": ("token_embd", (shape.vocabulary, shape.hidden)),
        "model.norm": ("output_norm", (shape.hidden,)),
    }
    if not shape.tied:
        outer["lm_head"] = ("output", (shape.vocabulary, shape.hidden))
    inner: dict[str, tuple[str, tuple[int, ...]]] = {
        "input_layernorm": ("attn_norm", (shape.hidden,)),
        "self_attn.q_proj": ("attn_q", (queries, shape.hidden)),
        "self_attn.k_proj": ("attn_k", (keys, shape.hidden)),
        "self_attn.v_proj": ("attn_v", (keys, shape.hidden)),
        "self_attn.q_norm": ("attn_q_norm", (shape.head,)),
        "self_attn.k_norm": ("attn_k_norm", (shape.head,)),
        "self_attn.o_proj": ("attn_output", (shape.hidden, queries)),
        "post_attention_layernorm": ("ffn_norm", (shape.hidden,)),
        "mlp.gate_proj": ("ffn_gate", (shape.intermediate, shape.hidden)),
        "mlp.up_proj": ("ffn_up", (shape.intermediate, shape.hidden)),
        "mlp.down_proj": ("ffn_down", (shape.hidden, shape.intermediate)),
    }
    found = dict(outer)
    for layer in range(shape.layers):
        for name, (short, sizes) in inner.items():
            found[f"model.layers.{layer}.{name}"] = (f"blk.{layer}.{short}", sizes)
    return {
        f"{name}.weight": Place(f"{short}.weight", sizes, _kind(sizes, kind)) for name, (short, sizes) in found.items()
    }


def _kind(sizes: tuple[int, ...], wanted: Type) -> Type:
    if len(sizes) == 1:
        return Type.F32
    return Type.F16 if wanted == Type.Q8_0 and sizes[-1] % Q8_BLOCK else wanted


def sources(folder: Path) -> dict[str, Source]:
    """The tensors of a policy's files by name; a file stays mapped as long as one of its tensors is held."""
    found, scale = _sources(tensor_files(folder)), read_adapter(folder)
    if scale is None:
        return found
    matrices = _sources([folder / adapter.WEIGHTS])
    for name in adapter.adapted(matrices):
        down, up = (matrices[part] for part in adapter.names(name))
        if name not in found or (up.shape[:1] + down.shape[1:], up.shape[1:]) != (found[name].shape, down.shape[:1]):
            raise ValueError(f"the adapter's matrices do not fit {name}")
        found[name] = replace(found[name], added=Adapter(down, up, scale))
    return found


def _sources(parts: Iterable[Path]) -> dict[str, Source]:
    found: dict[str, Source] = {}
    for part in parts:
        with part.open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        header = tensors.header_of(view)
        described = json.loads(header[tensors.PREFIX_BYTES :])
        for tensor in tensors.layout(header, len(view)):
            if tensor.name in found:
                raise ValueError(f"two files hold {tensor.name}")
            entry = described[tensor.name]
            source = Source(_TYPE_OF[entry["dtype"]], tuple(entry["shape"]), view[tensor.begin : tensor.end])
            if math.prod(source.shape) * tensor.element_bytes != len(source.data):
                raise ValueError(f"{tensor.name} has another size than its shape says")
            found[tensor.name] = source
    return found


def misfits(wanted: Mapping[str, Place], given: Mapping[str, Source], shape: Shape) -> list[str]:
    """The names of tensors that are missing, too many, or of another shape."""
    ignored = {"lm_head.weight"} if shape.tied else set()
    wrong = wanted.keys() ^ (given.keys() - ignored)
    wrong |= {name for name, place in wanted.items() if name in given and given[name].shape != place.shape}
    return sorted(wrong)


def write_gguf(
    file: Path, shape: Shape, positions: int, wanted: Mapping[str, Place], given: Mapping[str, Source]
) -> None:
    """A model that llama.cpp can load."""
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_block_count(shape.layers)
    writer.add_context_length(positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(shape.vocabulary)
    for place in wanted.values():
        kind = gguf.GGMLQuantizationType(place.kind)
        writer.add_tensor_info(place.name, place.shape, np.dtype(np.float32), place.size_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, place in wanted.items():
        writer.write_tensor_data(given[name].encoded(place.kind))
    writer.close()
