"""The folders that a policy is published as: a whole policy, the base of adapters, an adapter.

`publication` computes and places one tensor at a time; this module joins the tensors, the canary, the configuration and
the tokenizer's files to a folder in hub format. Every rank calls these methods, as each holds a shard of the weights;
rank 0 writes.
"""

import copy
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from coordinator.learner.publication import (
    HubFiles,
    Published,
    canary_text,
    carried_buffers,
    computing_as_published,
    in_range,
    modules_beside,
    scored_canary,
)
from coordinator.learner.ranks import Ranks
from coordinator.model.lora import Adapters
from protocol.policy import adapter, canary
from swarm_exact.merging import narrowed

GGUF_MAGIC = b"GGUF"


class PolicyWriter:
    """Writes a policy in training in the type that it is published in."""

    def __init__(
        self, model: Any, adapters: Adapters | None, ranks: Ranks, *, source: Path, dtype: torch.dtype
    ) -> None:
        """Write `model` with `adapters`; the tokenizer's files are those of the folder `source`."""
        self._model = model
        self._adapters = adapters
        self._ranks = ranks
        self._source = source
        self._dtype = dtype
        self._canary_text = canary_text(source, model.config.get_text_config())

    def save_hub(self, folder: Path) -> None:
        """Write the policy in hub format: its current weights in its original type, tokenizer and canary."""
        self.publishing(folder)()

    def publishing(self, folder: Path) -> Callable[[], None]:
        """Return the job that scores the canary and writes the folder; it must run before any weight changes.

        One rank runs it in parallel with the next update, in modules of its own. Several ranks gather the weights of
        each layer together: they use the model itself, and run it at once (see `crew`).
        """
        return partial(self._publish, folder, self._model if self._ranks.size > 1 else modules_beside(self._model))

    def _publish(self, folder: Path, model: Any) -> None:
        if self._ranks.first:
            folder.mkdir(parents=True, exist_ok=True)
        self._write_canary(folder, self._whole, model)
        self._write(folder, self._whole)

    def save_base(self, folder: Path) -> None:
        """Write the base that adapters are published beside: the starting weights, configuration and tokenizer."""
        self._write(folder, self._cast)

    def save_adapter(self, folder: Path, base: str = "") -> None:
        """Write the adapter for the base of that name, and the canary of both together."""
        assert self._adapters
        if self._ranks.first:
            folder.mkdir(parents=True, exist_ok=True)
            matrices = {name: part.cpu() for name, part in self._adapters.rounded(self._dtype).items()}
            save_file(matrices, folder / adapter.WEIGHTS, {"format": "pt"})
            (folder / adapter.CONFIG).write_bytes(self._adapters.config(base))
        self._write_canary(folder, self._merged_by_nodes, self._model)

    def _write(self, folder: Path, published: Published) -> None:
        """Write a folder in hub format, by rank 0, with the weights that `published` makes of the trained ones."""
        buffers = carried_buffers(self._model)
        files = HubFiles(self._model, self._dtype, buffers)
        weights = {name: weight.detach() for name, weight in self._model.named_parameters()}
        with files.open(folder) if self._ranks.first else nullcontext() as write:
            for names in files.together:
                trained = [name for name in names if name in weights]
                gathered = [(name, self._gathered(name, weights[name], published)) for name in trained]
                if write:
                    whole = {name: rows for name, rows in gathered if rows is not None}
                    write(whole | {name: buffers[name] for name in names if name in buffers})
        if not self._ranks.first:
            return
        config = copy.copy(self._model.config)
        config.dtype = self._dtype
        config.architectures = [type(self._model).__name__.removeprefix("FSDP")]
        vars(config).pop("auto_map", None)  # it names code, which nodes refuse
        config.save_pretrained(folder)
        self._model.generation_config.save_pretrained(folder)
        for source in self._source.iterdir():
            if source.name.startswith(("tokenizer", "special_tokens", "chat_template")) and not _is_gguf(source):
                shutil.copyfile(source, folder / source.name)

    def _gathered(self, name: str, weight: torch.Tensor, published: Published) -> torch.Tensor | None:
        """Return one whole published weight in rank 0's memory."""
        rows = published(name, self._ranks.local(weight), self._ranks.rows(weight))
        return self._ranks.gather(rows, weight)

    def _cast(self, name: str, rows: torch.Tensor, places: slice) -> torch.Tensor:
        """Return rows of a weight without adapters, in the published dtype."""
        return in_range(name, narrowed(name, rows, self._dtype, places.start or 0))

    def _whole(self, name: str, rows: torch.Tensor, places: slice) -> torch.Tensor:
        """Return rows of a weight with adapters merged, in the published dtype."""
        return self._cast(name, self._adapters.merged(name, rows, places) if self._adapters else rows, places)

    def _merged_by_nodes(self, name: str, rows: torch.Tensor, places: slice) -> torch.Tensor:
        """Return rows of a weight as nodes merge the base and the adapter."""
        assert self._adapters
        return in_range(name, self._adapters.as_nodes_merge(name, rows, places, self._dtype))

    def _write_canary(self, folder: Path, published: Published, model: Any) -> None:
        """Write the canary of weights as they are published; every rank computes it, and rank 0 writes it.

        `model` is the model itself, or its copy for another thread, which has no adapters attached.
        """
        silent = self._adapters.silent() if self._adapters and model is self._model else nullcontext()
        with silent, computing_as_published(model, published):
            scored = scored_canary(model, self._canary_text)
        if self._ranks.first:
            (folder / canary.FILE_NAME).write_text(json.dumps(scored.model_dump()))


def _is_gguf(file: Path) -> bool:
    """Return True for a GGUF file, which transformers copies under the name of a tokenizer."""
    with file.open("rb") as opened:
        return opened.read(len(GGUF_MAGIC)) == GGUF_MAGIC
