"""The auditor's model, which scores the samples of whole groups with one version and computes as the learner does.

- Samples are packed: each prompt is computed once, without padding (`coordinator.model.forward`). If the results differ
  from those of each sample alone, each sample is computed after a copy of its prompt.
- Matrices keep the type in which they were published and are widened while they are used: float32 products of the
  same numbers, in half the memory.
- Memory is bounded by `BODY_TOKENS_MAX` tokens at once in the body and `HEAD_LOGITS_MAX` logits at once in the head.
  There is never a tensor [samples, tokens, vocabulary].
- The values of each position are computed in slices, as `coordinator.rules.replay.score` defines them.
- `moved` is called after every module that computed something, so that a slow replay is not taken for a hanging one.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from coordinator.base.files import read_at_most
from coordinator.model.adapter_files import adapted_weights
from coordinator.model.batch import Tensors, pieces
from coordinator.model.forward import choose_way, packs, predict
from coordinator.model.head import Head
from coordinator.model.loading import keep_as_published, load_model
from coordinator.model.lora import weights_by_stored_name
from coordinator.publishing import weights
from coordinator.rules.replay import MARGIN_MAX, Prefill, Scored
from protocol import limits
from protocol.errors import AuditFailed
from protocol.policy import model_config
from protocol.work.sampling import uniforms
from swarm_exact import cards
from swarm_exact.merging import without_adapter

BODY_TOKENS_MAX = 4096
"""The tokens of prompts and completions in one pass; one sample may be longer. More are not faster on a CPU."""

HEAD_LOGITS_MAX = 2**23
"""The logits in one slice: 55 positions of a 150k vocabulary, 32 MiB in float32. Each widens the output layer."""

BLOCK = 256
"""The tokens of the vocabulary whose probabilities are summed at once; only the claimed token needs its own."""

NOTHING = Scored(logprobs=np.zeros(0), margins=np.zeros(0), dictated=np.zeros(0, np.int64))
"""The score of an empty completion."""

NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}
"""The types whose numbers float32 can represent exactly."""


def nobody_watches() -> None:
    """Ignore progress."""


class VersionScorer:
    """A policy version, ready to score."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | str = torch.float32,
        device: str = "cpu",
        threads: int | None = None,
        moved: Callable[[], None] = nobody_watches,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)  # for the whole process: all its versions share them
        self._moved = moved
        try:
            self._model = load_policy(folder, getattr(torch, dtype) if isinstance(dtype, str) else dtype, device)
            moved()
            self._head = Head.for_model(self._model)
            self._vocabulary: int = self._head.output.weight.shape[0]
            for module in self._model.modules():
                if not any(True for _ in module.children()):
                    module.register_forward_hook(lambda *_: moved())
            if reason := choose_way(self._model):
                raise AuditFailed(f"The policy in {folder} cannot be replayed: {reason}.")
        except AuditFailed:
            raise
        except Exception as error:  # invalid files can raise any error
            raise AuditFailed(f"The policy in {folder} cannot be loaded: {error!r}") from error

    @property
    def packs(self) -> bool:
        """True if a prompt is computed once for all samples of its group."""
        return packs(self._model)

    def score(self, claims: Sequence[Prefill]) -> list[list[Scored]]:
        """Return the scores of every claim's completions."""
        vocabulary, scores = self._vocabulary, dict[tuple[int, int], Scored]()
        if any(
            int(part.max(initial=0)) >= vocabulary for claim in claims for part in (claim.prompt, *claim.completions)
        ):
            raise AuditFailed(f"A claim has tokens beyond this version's vocabulary of {vocabulary}.")
        rows = [
            (place, number)
            for place, claim in enumerate(claims)
            for number, tokens in enumerate(claim.completions)
            if len(tokens)
        ]
        if rows:
            data = _tensors(claims, rows)
            with torch.inference_mode():
                for piece in pieces(data, torch.arange(len(rows)), BODY_TOKENS_MAX, packed=self.packs):
                    chosen = [rows[row] for row in piece.tolist()]
                    scores.update(zip(chosen, self._score(claims, chosen, data, piece), strict=True))
        return [
            [scores.get((place, number), NOTHING) for number in range(len(claim.completions))]
            for place, claim in enumerate(claims)
        ]

    def _score(
        self, claims: Sequence[Prefill], chosen: list[tuple[int, int]], data: Tensors, piece: torch.Tensor
    ) -> list[Scored]:
        """Score the chosen samples in one pass of the body."""
        lengths = data.lengths[piece].tolist()
        width = max(lengths)
        drawn = [
            torch.from_numpy(uniforms(claims[place].seed, number, length))
            for (place, number), length in zip(chosen, lengths, strict=True)
        ]
        states, source, targets, places = predict(self._model, data, piece)
        places = places.cpu()
        device = states.device
        chances = pad_sequence(drawn, True).flatten()[places].to(device)  # [M]
        heats = [(claims[place].temperature, claims[place].own_temperature) for place, _ in chosen]
        temperatures = torch.tensor([version for version, _ in heats])[places // width].to(device)
        own = None
        if any(drawn_at is not None for _, drawn_at in heats):
            every = torch.tensor([version if drawn_at is None else drawn_at for version, drawn_at in heats])
            own = every[places // width].to(device)
        step = max(1, HEAD_LOGITS_MAX // self._vocabulary)
        parts = []
        for start in range(0, len(source), step):
            at = slice(start, start + step)
            logits = self._head.logits(states[source[at]])
            parts.append(
                score_positions(logits, targets[at], chances[at], temperatures[at], None if own is None else own[at])
            )
            self._moved()
        tables = []
        for part in zip(*parts, strict=True):
            values = torch.cat(part).cpu()
            tables.append(values.new_zeros(len(chosen) * width).index_put_((places,), values).view(-1, width).numpy())
        return [Scored(*(table[row, :length] for table in tables)) for row, length in enumerate(lengths)]


def score_positions(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    chances: torch.Tensor,
    temperatures: torch.Tensor,
    own: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Compute `replay.score` of positions: logits [t, V] → log-probability, margin, dictated: [t] each.

    `own` are the temperatures at which the tokens were to be drawn; None: the versions' in all positions.
    """
    scores = torch.log_softmax(logits / temperatures[:, None], dim=-1)  # [t, V]
    logprobs = scores.gather(1, tokens[:, None])[:, 0].double()
    if own is None:
        dictated, below, upto = _picked(scores, tokens, chances)
        missed = _missed(_log_odds(below), _log_odds(upto), chances, torch.ones_like(below))
    else:
        drawn = torch.log_softmax(logits / own.where(own > 0, 1.0)[:, None], dim=-1)
        edges = _edges(drawn, tokens)
        dictated, _, _ = _picked(drawn, tokens, chances)
        missed = _missed(*edges, chances, (own.where(own > 0, 1.0) / temperatures).double())
        likeliest = logits.max(-1)
        behind = (likeliest.values - logits.gather(1, tokens[:, None])[:, 0]) / temperatures
        dictated = dictated.where(own > 0, likeliest.indices)
        missed = missed.where(own > 0, behind.double())
    return logprobs, missed.clamp(max=MARGIN_MAX).where(dictated != tokens, 0.0), dictated


def _picked(scores: torch.Tensor, tokens: torch.Tensor, chances: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the token that each uniform picks, and the probabilities below and up to the claimed one: [t] each.

    It overwrites the log-probabilities `scores` [t, V].
    """
    vocabulary = scores.shape[1]
    odds = pad(scores.exp_(), (0, -vocabulary % BLOCK)).view(len(tokens), -1, BLOCK)  # [t, B, BLOCK]
    cumulative = odds.sum(-1, dtype=torch.float64).cumsum(-1)  # [t, B] of whole blocks
    total = cumulative[:, -1]
    if not torch.isfinite(total).all():
        raise AuditFailed("The policy gives probabilities that are not numbers.", hint="Its weights are damaged.")
    target = torch.minimum(chances * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    within = _within(odds, cumulative, block)
    offset = torch.searchsorted(within, target[:, None], right=True)[:, 0].clamp(max=BLOCK - 1)
    theirs = _within(odds, cumulative, tokens // BLOCK)
    upto = theirs.gather(1, tokens[:, None] % BLOCK)[:, 0]
    before = _before(cumulative, tokens // BLOCK)
    below = theirs.gather(1, (tokens[:, None] % BLOCK - 1).clamp(min=0))[:, 0].where(tokens % BLOCK > 0, before)
    return block * BLOCK + offset, below / total, upto / total


def _edges(scores: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-odds below and up to the claimed tokens: [t] each, exact where probabilities would be 0 or 1."""
    ids, claimed = torch.arange(scores.shape[1], device=scores.device), tokens[:, None]
    masks = (ids >= claimed, ids < claimed, ids > claimed, ids <= claimed)
    low, rest, high, after = (scores.masked_fill(mask, -torch.inf).logsumexp(-1).double() for mask in masks)
    return low - rest, high - after


def _missed(below: torch.Tensor, upto: torch.Tensor, chances: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Compute `replay.score`'s distance between each uniform and the claimed token's part of the distribution: [t]."""
    target = _log_odds(chances)
    bounds = _log_odds(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
    lowest, highest = (bound * (1 / scales).clamp(min=1.0) for bound in bounds)
    short = below.maximum(lowest).minimum(highest) - target
    beyond = target - upto.maximum(lowest).minimum(highest)
    return short.maximum(beyond).clamp(min=0.0) * scales


def _log_odds(chances: torch.Tensor) -> torch.Tensor:
    """Compute `replay.log_odds`."""
    inner = chances.clamp(2.0**-54, 1 - 2.0**-53)
    return inner.log() - (-inner).log1p()


def _before(cumulative: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Return the sum before a block of each position: [t]."""
    return cumulative.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0].where(block > 0, 0.0)


def _within(odds: torch.Tensor, cumulative: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Return the cumulative sums in one block of each position: [t, BLOCK]."""
    return (
        odds[torch.arange(len(block), device=block.device), block].double().cumsum(-1)
        + (_before(cumulative, block)[:, None])
    )


def _tensors(claims: Sequence[Prefill], rows: Sequence[tuple[int, int]]) -> Tensors:
    """Return claims as tensors for the learner's forward pass; none of them is trained on."""
    used = sorted({place for place, _ in rows})
    tokens = [torch.from_numpy(claims[place].completions[number].astype(np.int64)) for place, number in rows]
    mask = pad_sequence([torch.ones(len(completion)) for completion in tokens], True)
    return Tensors(
        prompts=tuple(torch.from_numpy(claims[place].prompt.astype(np.int64)) for place in used),
        owners=torch.tensor([used.index(place) for place, _ in rows]),
        tokens=pad_sequence(tokens, True),
        mask=mask,
        behaviour=mask,
        rewards=mask[:, 0],
        weights=mask[:, 0],
        taught=mask,
    )


def load_policy(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """Return the model of a policy folder. Nothing is downloaded, and no code or pickle of the folder is run."""
    # A progress bar would be mixed with the findings.
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates only a part of its functions
    cards.compute_in_full(torch.device(device))
    with without_adapter(folder) as base:
        require_borne_out(base)
        stored = weights.matrix_types(weights.weight_files(base))
        narrow = NARROW.get(next(iter(stored))) if len(stored) == 1 else None
        if dtype != torch.float32:
            keep = partial(_lay_out_in, dtype=dtype)
        else:
            keep = partial(keep_as_published, dtype=narrow) if narrow else partial(_lay_out_in, dtype=dtype)
        model = load_model(base, keep)
    adapted = dict[str, Any]()
    with torch.no_grad():
        for name, weight in adapted_weights(folder):
            adapted = adapted or weights_by_stored_name(model)
            adapted[name].copy_(weight)
    return model.to(device, dtype).eval() if dtype != torch.float32 else model.to(device).eval()


def _lay_out_in(model: Any, dtype: torch.dtype) -> None:
    """Convert a model's weights to this type before they are loaded, so that no wider copy is ever held."""
    model.requires_grad_(False)
    if dtype != torch.float32:
        model.to(dtype)


def require_borne_out(base: Path) -> None:
    """Refuse a configuration that names code, or needs more memory than its tensors justify, before loading it."""
    config = json.loads(read_at_most(base / "config.json", limits.POLICY_CONFIG_MAX_BYTES))
    model_config.require_plain(config)
    if reason := model_config.reason_to_refuse(config):
        raise AuditFailed(f"This policy cannot be audited: {reason}.")
    files = weights.weight_files(base)
    model_config.require_layers(config, len(weights.shapes(files)))
    described = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(described, trust_remote_code=False)  # type: ignore[no-untyped-call]  # transformers annotates only a part of its functions
    promised = sum(tensor.numel() for tensor in chain(model.parameters(), model.buffers()))
    model_config.require_borne_out(promised, sum(file.stat().st_size for file in files))
