"""Decoder of any causal model of `transformers`, for architectures without a decoder of ours.

- Prompts are padded on the left, so the newest token of every row is in the last column; the mask hides the padding,
  and positions count from each prompt's own first token. New rows would shift the others, so none join midway.
- No network, and no code from the folder, whatever its configuration says.
- Weights that the model stores differently from the files (the experts of a layer in one tensor, other names) are
  written into views of the model's own tensors, by the names of the files: a swap needs no second model.
- The model's size by the configuration is compared with the files before memory is allocated: `transformers` would
  first allocate tensors that are missing or have another size, and report them only then.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from swarm_exact.merging import without_adapter
from swarm_node.engine.decoder import SavedRow
from swarm_node.engine.policy_files import read_adapter, require_borne_out
from swarm_node.engine.torch import weights
from swarm_node.engine.torch.sampler import TorchLogits


class _View(torch.Tensor):
    """A tensor that transformers splits into views, never copies, when a file holds its parts."""

    def contiguous(self, *_: Any, **__: Any) -> "_View":
        return self


class Generic:
    """`Decoder` of one policy folder."""

    joins_midway = False

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        with without_adapter(folder) as base:
            require_borne_out(base, _promised(base))
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                base,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        model, report = loaded
        if missing := report["missing_keys"]:  # transformers would initialise them at random
            raise ValueError(f"it lacks tensors: {', '.join(sorted(missing)[:5])}")
        self._model = model.to(device).eval().requires_grad_(False)
        self.device, self.dtype = device, dtype
        self.numerics = weights.numerics(device, dtype)
        config = self._model.config.get_text_config()
        self.vocab_size, self.positions_max = int(config.vocab_size), int(config.max_position_embeddings)
        self._places = self._named()
        self._tensors = weights.ModelTensors(self._places, frozenset(self._model.state_dict()) - self._places.keys())
        self.parameters = sum(part.numel() for part in self._model.parameters())
        if read_adapter(folder) is not None and (wrong := self._tensors.fill(folder)):
            raise ValueError(f"its tensors are not those that config.json describes: {', '.join(wrong[:5])}")
        self._cache: Any = None
        self._mask = self._positions = torch.zeros(0, dtype=torch.long, device=device)

    def swap(self, folder: Path) -> bool:
        return bool(self._places) and self._tensors.swap(folder, used=self._named)

    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> TorchLogits:
        width = max(map(len, prompts))
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        tokens = torch.tensor(padded, device=self.device)  # [prompts, width]
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=self.device)
        out = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )
        counts = torch.tensor(copies, device=self.device)
        owners = torch.arange(len(prompts), device=self.device).repeat_interleave(counts)
        self._cache = out.past_key_values
        self._cache.reorder_cache(owners)  # one row per sample from here on
        self._mask, self._positions = mask[owners], mask.sum(1)[owners]
        return TorchLogits(self._logits(out)[owners])

    def decode(self, tokens: Sequence[int]) -> TorchLogits:
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        out = self._model(
            input_ids=torch.tensor(tokens, device=self.device)[:, None],
            attention_mask=self._mask,
            position_ids=self._positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._positions = self._positions + 1
        return TorchLogits(self._logits(out))

    def move(self, sources: Sequence[int], targets: Sequence[int], rows: int) -> None:
        if not rows:
            return self.clear()
        kept = torch.arange(rows, device=self.device)
        kept[targets] = torch.tensor(sources, dtype=torch.long, device=self.device)
        self._mask, self._positions = self._mask[kept], self._positions[kept]
        self._cache.reorder_cache(kept)

    def save(self, row: int) -> SavedRow | None:
        """Return None: a row's place in the cache depends on the padding of the others."""
        return None

    def resume(self, saved: Sequence[SavedRow], texts: Sequence[Sequence[int]]) -> TorchLogits:
        raise NotImplementedError("`save` keeps no row, so there is none to resume.")

    def clear(self) -> None:
        self._cache = None

    def _named(self) -> weights.Places:
        """Return the model's tensors by the files' names; empty if some of them are not views of the model's own."""
        kept = self._model.state_dict()
        buffers = ((name, buffer) for name, buffer in self._model.named_buffers() if name in kept)
        ours = {name: part.detach().as_subclass(_View) for name, part in chain(self._model.named_parameters(), buffers)}
        own = {part.untyped_storage().data_ptr() for part in ours.values()}
        stored: dict[str, torch.Tensor] = revert_weight_conversion(self._model, ours)
        if any(part.untyped_storage().data_ptr() not in own for part in stored.values()):
            return {}
        return {name: (part.as_subclass(torch.Tensor), part.shape) for name, part in stored.items()}

    def _logits(self, out: Any) -> torch.Tensor:
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits


def _promised(base: Path) -> int:
    """Return the number of parameters that a folder's configuration describes, without allocating them."""
    config = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]  # transformers annotates half
    return sum(tensor.numel() for tensor in chain(model.parameters(), model.buffers()))
