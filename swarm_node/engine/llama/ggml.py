"""Functions of ggml that llama-cpp-python does not bind: encoding values in its types, and writing weights in place.

- `watching` finds a loaded model's weights: the tensors that a decoding step reads. A name may have several tensors:
  the tied head of a repacked or offloaded model is a copy of the embedding, and both must be written.
- The layout of `ggml_tensor` is not a stable interface. Names are read by the layout and by ggml's function: where they
  differ, no weights are found, and versions are loaded anew instead of in place.
"""

import ctypes
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp._ggml import libggml
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Type(IntEnum):
    """Storage type of a tensor, with ggml's numbers."""

    F32 = 0
    F16 = 1
    Q8_0 = 8
    BF16 = 30


Q8_BLOCK = 32
"""Values of a row that share a scale in Q8_0."""

_BYTES_PER_BLOCK = {Type.F32: 4 * Q8_BLOCK, Type.F16: 2 * Q8_BLOCK, Type.BF16: 2 * Q8_BLOCK, Type.Q8_0: Q8_BLOCK + 2}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    )


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(libggml, name)
    function.restype, function.argtypes = result, arguments
    return function


_name = _function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
_size_bytes = _function("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
_set = _function(
    "ggml_backend_tensor_set", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)  # fmt: skip  # as in its header
_quantize = _function(
    "ggml_quantize_chunk", ctypes.c_size_t,
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
)  # fmt: skip  # type, source, target, first value, rows, values per row, importance


def encoded_bytes(values: int, kind: Type) -> int:
    """Return the size of `values` values in whole rows."""
    return values * _BYTES_PER_BLOCK[kind] // Q8_BLOCK


def encode(values: NDArray[np.float32], kind: Type) -> Bytes:
    """Return values as ggml stores them: the last axis holds the bytes of a row."""
    *outer, width = values.shape
    encoded = np.empty((*outer, encoded_bytes(width, kind)), np.uint8)
    rows = values.size // width
    exact = np.ascontiguousarray(values)
    written = _quantize(kind, exact.ctypes.data, encoded.ctypes.data, 0, rows, width, None)
    if written != encoded.size:
        raise ValueError(f"ggml made {written} bytes of {encoded.size}")
    return encoded


class Weight:
    """All tensors of one name."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    def add(self, address: int) -> None:
        self._addresses.add(address)

    def fits(self, size_bytes: int) -> bool:
        """Return True if all tensors have this size."""
        return all(_size_bytes(address) == size_bytes for address in self._addresses)

    def write(self, values: Bytes) -> None:
        """Overwrite the tensors with encoded values."""
        for address in self._addresses:
            _set(address, values.ctypes.data, 0, values.nbytes)


@contextmanager
def watching(parameters: Any) -> Iterator[dict[str, Weight]]:
    """Collect the weights that the steps of a context with these parameters read."""
    weights: dict[str, Weight] = defaultdict(Weight)

    def look(node: int, _ask: bool, _data: int | None) -> bool:
        tensor = _Tensor.from_address(node)
        if tensor.name == _name(node):  # otherwise the layout is unknown
            for source in filter(None, tensor.src):
                name = _Tensor.from_address(source).name
                if name == _name(source) and name.endswith((b".weight", b".bias")):
                    weights[name.decode()].add(source)
        return False  # the values are not needed

    callback = llama_cpp.ggml_backend_sched_eval_callback(look)
    parameters.cb_eval = callback
    yield weights
