"""A policy in llama.cpp whose weights can be overwritten in place.

- The first load goes through a GGUF file, which is deleted afterwards: weights are read into memory, not mapped.
- A swap encodes and writes only the tensors that differ from the current ones.
- If not all weights were found in memory (see `ggml`), every version is loaded anew.
"""

import ctypes
import logging
import math
import tempfile
import weakref
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from swarm_node.engine.llama import weights
from swarm_node.engine.llama.ggml import Type, Weight, watching
from swarm_node.engine.llama.recipes import recipe_of

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
        given = weights.sources(folder)
        self._places = weights.places(self._recipe, self._config, kind, given)
        with tempfile.TemporaryDirectory(prefix="echo-swarm-") as scratch:
            file = Path(scratch) / "policy.gguf"
            weights.write_gguf(file, self._recipe, self._config, self._places, given)
            self.pointer = _load(file, gpu_layers)
        weakref.finalize(self, llama_cpp.llama_model_free, self.pointer)
        self.parameters = sum(math.prod(place.shape) for place in self._places)
        self._digests = {place.name: place.digest(given) for place in self._places}
        self._weights = self._find()

    def swap(self, folder: Path) -> bool:
        """Write the tensors that differ in another version; return False, and write nothing, if the shapes differ."""
        given = weights.sources(folder)
        if not self._weights:
            return False
        if weights.misfits(self._places, weights.places(self._recipe, self._config, self._kind, given)):
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
