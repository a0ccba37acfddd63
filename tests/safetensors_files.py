"""Safetensors files of any dtype, made and changed element by element: what patches are tested on."""

import json
from collections.abc import Mapping
from random import Random

Tensors = Mapping[str, tuple[str, bytes]]
"""Name → dtype and bytes, in the order of the file."""


def file_of(tensors: Tensors, *, metadata: Mapping[str, str] | None = None, header_order: int = 1) -> bytes:
    """The file; `header_order=-1` names the tensors backwards, which changes no tensor's place."""
    entries: dict[str, object] = {}
    position = 0
    for name, (dtype, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": [len(data)], "data_offsets": [position, position + len(data)]}
        position += len(data)
    entries = dict(list(entries.items())[::header_order])
    if metadata is not None:
        entries = {"__metadata__": dict(metadata)} | entries
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + b"".join(data for _, data in tensors.values())


def raw_file(header: object, data: bytes = b"") -> bytes:
    """A file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def nudged(data: bytes, *, share: float, rng: Random, width: int = 2) -> bytes:
    """Return the file with some elements changed in their lowest bit, as a small step of an optimizer does."""
    changed = bytearray(data)
    for start in range(0, len(data), width):
        if rng.random() < share:
            changed[start] ^= 1
    return bytes(changed)


def weights(seed: int, elements: int = 20_000) -> bytes:
    """bf16 numbers of ordinary size: exponents near one half, everything else by chance."""
    rng = Random(seed)
    exponents = (120 + rng.getrandbits(2) for _ in range(elements))
    return b"".join(
        (rng.getrandbits(1) << 15 | exponent << 7 | rng.getrandbits(7)).to_bytes(2, "little") for exponent in exponents
    )


def policy_file(seed: int = 1, elements: int = 20_000) -> bytes:
    """Two tensors of bf16 weights."""
    return file_of({"a": ("BF16", weights(seed, elements)), "b": ("BF16", weights(seed + 1, 500))})


def next_file(file: bytes, *, seed: int = 1, share: float = 0.01) -> bytes:
    """Return what a version after it could be: the same header, and a few weights nudged."""
    begin = 8 + int.from_bytes(file[:8], "little")
    return file[:begin] + nudged(file[begin:], share=share, rng=Random(seed))
