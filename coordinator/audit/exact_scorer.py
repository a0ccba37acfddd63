"""The auditor's model for nodes of its own exact class: it replays a claim to the bit.

- The forward pass and the draw are the node's own code (`swarm_exact`): both compute the same bits.
- The margin of a token that is not the dictated one is evidence for people, as `coordinator.audit.scorer` computes it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from coordinator.audit.scorer import BODY_TOKENS_MAX, HEAD_LOGITS_MAX, NOTHING, nobody_watches, score_positions
from coordinator.base.files import read_at_most
from coordinator.model.adapter_files import adapted_weights
from coordinator.publishing import weights
from coordinator.rules.replay import Prefill, Scored
from protocol import limits
from protocol.errors import AuditFailed, SwarmError
from protocol.policy import adapter, model_config
from protocol.work.sampling import uniforms
from swarm_exact.drawing import draw
from swarm_exact.model import ExactModel, KeysValues, numerics
from swarm_exact.shape import ModelShape, supports

CACHED_TOKENS_MAX = 4 * BODY_TOKENS_MAX
"""The tokens in the cache, where each sample has its own copy of the prompt; one sample may be longer."""


class ExactScorer:
    """A policy version, ready to score to the bit."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        threads: int | None = None,
        moved: Callable[[], None] = nobody_watches,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)  # for the whole process
        self._moved = moved
        try:
            shape = _shape(folder)
            self._model = ExactModel(shape, torch.device(device))
            _fill(self._model, folder)
            moved()
            self._model.check()
            moved()
        except SwarmError:
            raise
        except Exception as error:  # invalid files can raise any error
            raise AuditFailed(f"The policy in {folder} cannot be loaded: {error!r}") from error

    @torch.inference_mode()
    def score(self, claims: Sequence[Prefill]) -> list[list[Scored]]:
        """Return the scores of every claim's completions."""
        return [self._score(claim) for claim in claims]

    def _score(self, claim: Prefill) -> list[Scored]:
        """Score one group: the prompt once, and after it as many of its samples at once as fit."""
        most = max(int(part.max(initial=0)) for part in (claim.prompt, *claim.completions))
        if most >= self._model.shape.vocabulary:
            raise AuditFailed(f"A claim has token {most}, the vocabulary only {self._model.shape.vocabulary}.")
        scored = [NOTHING] * len(claim.completions)
        numbers = [number for number, tokens in enumerate(claim.completions) if len(tokens)]
        if not numbers:
            return scored
        device, cache = self._model.device, self._model.cache()
        prompt = torch.from_numpy(claim.prompt.astype(np.int64)).to(device)
        longest = max(len(claim.completions[number]) for number in numbers)
        cache.grow(1, len(prompt) + longest, 0)
        places = torch.arange(len(prompt), device=device)
        first = self._extend(cache, prompt, torch.zeros_like(places), places)[-1:]
        for chosen in _pieces(numbers, claim):
            cache.grow(len(chosen), len(prompt) + longest, 1)
            cache.values[:, :, :, 1 : len(chosen)] = cache.values[:, :, :, :1]
            for number, part in zip(chosen, self._samples(claim, chosen, cache, first), strict=True):
                scored[number] = part
        return scored

    def _samples(
        self, claim: Prefill, chosen: Sequence[int], cache: KeysValues, first: torch.Tensor
    ) -> Iterator[Scored]:
        """Yield the scores of samples, of which each has a row of the cache with the prompt."""
        device, begin = self._model.device, len(claim.prompt)
        texts = [claim.completions[number].astype(np.int64) for number in chosen]
        lengths = torch.tensor([len(text) for text in texts], device=device)
        tokens = torch.from_numpy(np.concatenate(texts)).to(device)
        rows = torch.arange(len(texts), device=device).repeat_interleave(lengths)
        places = torch.cat([torch.arange(begin, begin + len(text), device=device) for text in texts])
        # A token is predicted by the state of the one before it; the last one is predicted, and not read.
        states = torch.cat((first, self._extend(cache, tokens, rows, places)))
        before = torch.arange(len(tokens), device=device).where(places > begin, 0)
        chances = [uniforms(claim.seed, number, len(text)) for number, text in zip(chosen, texts, strict=True)]
        drawn_by = torch.from_numpy(np.concatenate(chances)).to(device)
        step = max(1, HEAD_LOGITS_MAX // self._model.shape.vocabulary)
        parts = []
        for start in range(0, len(tokens), step):
            at = slice(start, start + step)
            parts.append(self._positions(claim, states[before[at]], tokens[at], drawn_by[at]))
            self._moved()
        tables = [torch.split(torch.cat(part).cpu(), lengths.tolist()) for part in zip(*parts, strict=True)]
        for logprobs, margins, dictated in zip(*tables, strict=True):
            yield Scored(logprobs.numpy(), margins.numpy(), dictated.numpy())

    def _extend(
        self, cache: KeysValues, tokens: torch.Tensor, rows: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """Extend rows by tokens, a bounded number at once."""
        states = []
        for start in range(0, len(tokens), BODY_TOKENS_MAX):
            at = slice(start, start + BODY_TOKENS_MAX)
            states.append(self._model.extend(cache, tokens[at], rows[at], places[at]))
            self._moved()
        return torch.cat(states)

    def _positions(
        self, claim: Prefill, states: torch.Tensor, tokens: torch.Tensor, chances: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-probability, margin and dictated token of positions: [t] each."""
        logits = self._model.logits(states)
        heats = torch.full((len(tokens),), claim.temperature, dtype=torch.float32, device=logits.device)
        own = None if claim.own_temperature is None else torch.full_like(heats, claim.own_temperature)
        dictated, _ = draw(logits, heats, chances, own)
        logprobs, margins, _ = score_positions(logits, tokens, chances, heats, own)
        logprobs = logprobs.clamp(limits.LOGPROB_MIN, 0)
        return logprobs, margins.where(dictated != tokens, 0.0), dictated


def own_class(folder: Path, *, threads: int | None = None) -> str:
    """Return the exact class of this machine for a policy, without loading it; raise if it cannot be replayed."""
    if threads:
        torch.set_num_threads(threads)  # for the whole process
    return numerics(_shape(folder), torch.device("cpu"))


def _shape(folder: Path) -> ModelShape:
    config = json.loads(read_at_most(folder / "config.json", limits.POLICY_CONFIG_MAX_BYTES))
    model_config.require_plain(config)
    if not supports(config):
        raise AuditFailed(f"The policy in {folder} cannot be replayed to the bit: it is no Qwen3, Qwen2 or Llama.")
    model_config.require_layers(config, len(weights.shapes(_files(folder))))
    return ModelShape.from_config(config)


def _pieces(numbers: Sequence[int], claim: Prefill) -> Iterator[list[int]]:
    """Yield samples in lists whose tokens fit into one pass and the cache; one sample may be longer."""
    piece: list[int] = []
    width = len(claim.prompt) + max(len(claim.completions[number]) for number in numbers)
    for number in numbers:
        lengths = [len(claim.completions[each]) for each in (*piece, number)]
        cached = width * len(lengths)
        if piece and (sum(lengths) > BODY_TOKENS_MAX or cached > CACHED_TOKENS_MAX):
            yield piece
            piece = []
        piece.append(number)
    yield piece


def _files(folder: Path) -> list[Path]:
    return [path for path in weights.weight_files(folder) if path.name != adapter.WEIGHTS]


def _fill(model: ExactModel, folder: Path) -> None:
    """Copy a folder's tensors, with its adapter's product added, into the model; refuse others."""
    places, ignored = model.weights.places, model.weights.ignored
    missing = set(places)
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name not in ignored]  # noqa: SIM118  # a safetensors file is not a mapping
            for name in names:
                _place(places, name, file.get_tensor(name))
                missing.discard(name)
    if missing:
        raise AuditFailed(f"The policy in {folder} lacks tensors: {', '.join(sorted(missing)[:5])}.")
    for name, tensor in adapted_weights(folder):
        _place(places, name, tensor)


def _place(places: dict[str, tuple[torch.Tensor, torch.Size]], name: str, tensor: torch.Tensor) -> None:
    if name not in places or places[name][1] != tensor.shape:
        raise AuditFailed(f"The policy has a tensor that its configuration does not describe: {name[:100]}.")
    place = places[name][0]
    place.copy_(tensor.view(place.shape) if tensor.numel() == place.numel() else tensor)
