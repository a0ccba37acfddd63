"""The published form of the policy, made one tensor at a time, so that it needs no second copy of the weights.

    compute    a layer's weights are replaced by the published ones while that layer computes, and then restored; in
               parallel with an update, in modules of its own
    write      each weight is cast, gathered, written into its place in its file, and freed

- The files are those of transformers' `save_pretrained`, byte for byte; names, shapes and places are computed on the
  meta device, without any numbers.
- A weight that transformers stores under its own name and shape is written alone. Weights that it stores otherwise (the
  experts of a mixture, one tensor in the model and many in the file) are written together with those of their layer.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from tokenizers import Tokenizer
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from protocol.errors import ConfigInvalid
from protocol.policy import canary

PART_SIZE = "50GB"
"""The largest file of weights: transformers' own default, which all versions have used."""

NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types in safetensors' notation, in the order in which it writes them; within a type, names are sorted."""

Published = Callable[[str, torch.Tensor, slice], torch.Tensor]
"""A function from a weight's name, some of its trained rows and their position to the published rows."""


@contextmanager
def computing_as_published(model: Any, published: Published) -> Iterator[None]:
    """Make the model compute with its published weights in this block, without a gradient.

    FSDP gathers the weights of a layer before these hooks run, and frees them after.
    """
    with ExitStack() as hooks, torch.no_grad():
        for part, places in _parts(model):
            originals: list[tuple[nn.Module, str, nn.Parameter]] = []
            replace = partial(_replace, places, originals, published)
            hooks.callback(part.register_forward_pre_hook(replace).remove)
            put_back = partial(_put_back, originals)
            hooks.callback(part.register_forward_hook(put_back, prepend=True, always_call=True).remove)
        yield


def scores(model: Any, tokens: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the log-probability of each token but the first, computed in `dtype`; None means float32."""
    with torch.autocast(model.device.type, dtype, enabled=dtype is not None, cache_enabled=False):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1).gather(1, tokens[1:, None])[:, 0]


def scored_canary(model: Any, text: tuple[int, ...]) -> canary.Canary:
    """Score the canary's text with a model's weights, in float32 and in those lower precisions that hold its numbers.

    It is computed on the model's device. On a GPU it uses the default stream on any thread: its kernels alternate with
    those of an update, and both use the same memory pool. A separate stream would have a separate pool.
    """
    tokens = torch.tensor(text, device=model.device)
    full = _finite_scores(model, tokens, None)
    if not full:
        raise ConfigInvalid(
            "The weights give NaN or infinite log-probabilities: they have grown too large.",
            hint="The training has diverged: continue from an older version, with a lower learning rate.",
        )
    low, half = (_finite_scores(model, tokens, dtype) for dtype in (torch.bfloat16, torch.float16))
    return canary.Canary(tokens=text, logprobs=full, bfloat16=low, float16=half)


def _finite_scores(model: Any, tokens: torch.Tensor, dtype: torch.dtype | None) -> tuple[float, ...]:
    """Return `scores` as numbers; none if one is NaN or infinite, as where activations exceed float16's range."""
    found = scores(model, tokens, dtype)
    return tuple(found.tolist()) if bool(found.isfinite().all()) else ()


def modules_beside(model: Any) -> Any:
    """Return the same model in modules of its own, for another thread: weights and buffers are those of the model.

    `computing_as_published` replaces weights in modules, so it does not affect an update in the model's own modules.
    The model's hooks, such as those of its adapters, are not attached to these modules.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    made = copy.deepcopy(model, shared)
    for module in made.modules():
        module._forward_hooks.clear()
    return made


Place = tuple[nn.Module, str, str]
"""A module, the name of one of its weights in it, and the weight's name in the model."""


def _parts(model: Any) -> list[tuple[nn.Module, list[Place]]]:
    """Return each layer with all its weights, and each module outside of the layers with its own weights.

    A weight that several modules share has the name under which it is written.
    """
    written = {id(weight): name for name, weight in model.named_parameters()}
    layers = set(getattr(model.get_decoder(), "layers", ()))
    parts: dict[nn.Module, list[Place]] = {}
    places: list[Place] = []
    inside = ""
    for path, module in model.named_modules():
        if not (inside and path.startswith(inside)):
            inside = f"{path}." if module in layers else ""
            parts[module] = places = []
        places += [(module, leaf, written[id(weight)]) for leaf, weight in module.named_parameters(recurse=False)]
    return [(part, places) for part, places in parts.items() if places]


def _replace(places: list[Place], originals: list[Any], published: Published, *_: Any) -> None:
    for module, leaf, name in places:
        weight = getattr(module, leaf)
        originals.append((module, leaf, weight))
        rows = published(name, weight.detach(), slice(0, len(weight))).to(weight.dtype)
        setattr(module, leaf, nn.Parameter(rows, requires_grad=False))


def _put_back(originals: list[Any], *_: Any) -> None:
    while originals:
        setattr(*originals.pop())


def carried_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Return the buffers that a version carries unchanged beside its weights, such as routers' corrections."""
    kept = model.state_dict().keys()
    return {name: buffer.detach().cpu() for name, buffer in model.named_buffers() if name in kept}


def in_range(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Return published rows of a weight, or refuse rows beyond the range of float16."""
    if rows.dtype == torch.float16 and not bool(rows.isfinite().all()):
        raise ConfigInvalid(
            f"The weight {name} has grown beyond 65,504, the largest number of float16, in which it is published.",
            hint="Lower learner.learning_rate, or begin a round with a copy of the policy in bfloat16.",
        )
    return rows


def canary_text(folder: Path, config: Any) -> tuple[int, ...]:
    """Return the tokens of the canary's text; evenly spread tokens if the tokenizer cannot encode it."""
    count = min(canary.TOKENS, int(getattr(config, "max_position_embeddings", canary.TOKENS)))
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens = tokenizer.encode(canary.TEXT, add_special_tokens=False).ids[: canary.TOKENS]
        if count == canary.TOKENS and canary.is_written(tokens, tokenizer.decode(tokens)):
            return tuple(tokens)
    return canary.spread(config.vocab_size, count)


class HubFiles:
    """The weight files of a policy folder, laid out but not written."""

    def __init__(
        self, model: Any, dtype: torch.dtype, buffers: Mapping[str, torch.Tensor], part_size: str = PART_SIZE
    ) -> None:
        self._model = model
        left_out = set(model._keys_to_ignore_on_save or ())
        ours = {
            name: torch.empty(weight.shape, dtype=dtype, device="meta")
            for name, weight in model.named_parameters()
            if name not in left_out
        }
        ours |= {name: buffer.to("meta") for name, buffer in buffers.items()}
        stored = revert_weight_conversion(model, dict(ours))
        split = split_torch_state_dict_into_shards(
            stored, filename_pattern="model{suffix}.safetensors", max_shard_size=part_size
        )
        self._headers: dict[str, bytes] = {}
        self._places: dict[str, tuple[str, int]] = {}
        for file, names in split.filename_to_tensors.items():
            self._headers[file], begins = _header({name: stored[name] for name in names})
            self._places |= {name: (file, begin) for name, begin in begins.items()}
        self._index = {
            "metadata": {"total_parameters": model.num_parameters(), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        self.together: list[list[str]] = []
        """The model's names of weights that are written together, in the order in which ranks gather them."""
        layers: dict[str, list[str]] = {}
        for name, weight in ours.items():
            if name in stored and stored[name].shape == weight.shape:
                self.together.append([name])
            elif (layer := _layer(name)) in layers:
                layers[layer].append(name)
            else:
                layers[layer] = [name]
                self.together.append(layers[layer])

    @contextmanager
    def open(self, folder: Path) -> Iterator[Callable[[Mapping[str, torch.Tensor]], None]]:
        """Open the files in `folder`; yield a function that writes weights that belong together, by their names."""
        folder.mkdir(parents=True, exist_ok=True)
        if len(self._headers) > 1:
            index = json.dumps(self._index, indent=2, sort_keys=True) + "\n"
            (folder / "model.safetensors.index.json").write_text(index)
        with ExitStack() as stack:
            files: dict[str, BinaryIO] = {
                name: stack.enter_context((folder / name).open("wb")) for name in self._headers
            }
            for name, header in self._headers.items():
                files[name].write(header)

            def write(weights: Mapping[str, torch.Tensor]) -> None:
                for name, tensor in revert_weight_conversion(self._model, dict(weights)).items():
                    file, begin = self._places[name]
                    files[file].seek(begin)
                    files[file].write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)

            yield write


def _layer(name: str) -> str:
    """Return the path of a weight's layer, up to the layer's number; "" for a weight outside of all layers."""
    match = re.match(r".*?\.\d+\.", name)
    return match.group() if match else ""


def _header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file of these tensors, and the position of each tensor in the file."""
    order = list(NAMES)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name in sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name)):
        tensor = tensors[name]
        begins[name], end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}
