"""Scores the samples of whole groups under one version in batched prefills: the auditor's model.

- A prompt is computed once, and its cache shared by the group's samples, as in sampling and in training. Where that
  says something else than the model says of a sample alone (Jamba, whose states a cache cannot continue), each sample
  is computed behind a copy of its prompt, without a cache.
- Groups are taken in the order of their prompts' lengths, samples in the order of theirs: little is padding.
- Memory is bounded: so many padded tokens at once through the body, so many logits at once through the head. There
  is never a tensor [samples, tokens, vocabulary].
- What a position needs of its distribution is taken from each slice as `coordinator.audit.replay.score` defines it.
"""

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from coordinator.audit.replay import Prefill, Scored
from coordinator.files import read_at_most
from coordinator.learner.adapter_files import adapted_weights, without_adapter
from coordinator.learner.head import Head, body_of
from coordinator.learner.lora import weights_by_stored_name
from coordinator.publishing import weights
from protocol import architectures, limits, policy_config
from protocol.errors import AuditFailed
from protocol.sampling import uniforms

BODY_TOKENS_MAX = 16_384
"""Padded tokens of prompt and completion in one pass; one row may be longer."""

HEAD_LOGITS_MAX = 2**22
"""Logits in one slice: 27 positions of a 150k vocabulary; 16 MiB in float32, and 32 more for their cumulative sums."""

NOTHING = Scored(logprobs=np.zeros(0), below=np.zeros(0), upto=np.zeros(0), dictated=np.zeros(0, np.int64))
"""Of an empty completion."""


CHECKED = (((3, 1, 2), (2, 4)), ((5,), (1, 2)))
"""Tokens of prompts and completions that both ways are tried on, as (prompt, lengths of completions)."""

CHECKED_NATS = {torch.float32: 1e-3}
"""Largest difference of two ways through the same weights."""

CHECKED_ROUNDED_NATS = 0.1
"""Largest difference in lower precisions."""


@dataclass(frozen=True)
class _Row:
    """One completion on its way: where its answer belongs, and what is asked."""

    claim: int
    number: int
    tokens: torch.Tensor  # [T]
    uniforms: torch.Tensor  # [T]
    temperature: float


class Scorer:
    """One policy version, ready to score."""

    def __init__(self, folder: Path, *, dtype: torch.dtype = torch.float32, threads: int | None = None) -> None:
        if threads:
            torch.set_num_threads(threads)  # of the whole process: all its versions share them
        try:
            model = _load(folder, dtype)
            self._body, self._head = body_of(model), Head.of(model)
            self._vocabulary: int = self._head.output.weight.shape[0]
            self.shares_prompts = True
            """Whether a prompt is computed once for all samples of its group."""
            self._require_right(model, folder, CHECKED_NATS.get(dtype, CHECKED_ROUNDED_NATS))
        except AuditFailed:
            raise
        except Exception as error:  # nobody can list what garbage in a folder does to those who read it
            raise AuditFailed(f"The policy in {folder} cannot be loaded: {error!r}") from error

    def score(self, claims: Sequence[Prefill]) -> list[list[Scored]]:
        """For every claim the replay of each of its completions."""
        vocabulary, found = self._vocabulary, dict[tuple[int, int], Scored]()
        if any(
            int(part.max(initial=0)) >= vocabulary for claim in claims for part in (claim.prompt, *claim.completions)
        ):
            raise AuditFailed(f"A claim has tokens beyond this version's vocabulary of {vocabulary}.")
        with torch.inference_mode():
            for batch in _batches(claims):
                (self._score if self.shares_prompts else self._score_rows)(claims, batch, found)
        return [
            [found.get((place, number), NOTHING) for number in range(len(claim.completions))]
            for place, claim in enumerate(claims)
        ]

    def _score(self, claims: Sequence[Prefill], batch: list[int], found: dict[tuple[int, int], Scored]) -> None:
        """Score the claims of these numbers, whose prompts go through the body together."""
        prompts = [torch.from_numpy(claims[place].prompt.astype(np.int64)) for place in batch]
        mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], True, padding_side="left")  # [G, P]
        prefix = self._body(
            input_ids=pad_sequence(prompts, True, padding_side="left"),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
        )
        rows = sorted(_rows(claims, batch), key=lambda row: len(row.tokens))
        owners = {place: owner for owner, place in enumerate(batch)}
        for block in _blocks(rows, mask.shape[1]):
            owner = torch.tensor([owners[row.claim] for row in block])
            states = self._completions(block, owner, prefix, mask)  # [N, T, H]
            for row, state in zip(block, states, strict=True):
                found[row.claim, row.number] = self._scored(row, state[: len(row.tokens)])

    def _score_rows(self, claims: Sequence[Prefill], batch: list[int], found: dict[tuple[int, int], Scored]) -> None:
        """Score the same without a cache; what is padded on the right, nothing looks at that is causal."""
        prompts = {place: torch.from_numpy(claims[place].prompt.astype(np.int64)) for place in batch}
        rows = sorted(_rows(claims, batch), key=lambda row: len(prompts[row.claim]) + len(row.tokens))
        for block in _blocks(rows, max(map(len, prompts.values()))):
            texts = [torch.cat([prompts[row.claim], row.tokens[:-1]]) for row in block]
            states = self._body(input_ids=pad_sequence(texts, True), use_cache=False).last_hidden_state
            for row, state in zip(block, states, strict=True):
                first = len(prompts[row.claim]) - 1
                found[row.claim, row.number] = self._scored(row, state[first : first + len(row.tokens)])

    def _completions(self, block: list[_Row], owner: torch.Tensor, prefix: Any, mask: torch.Tensor) -> torch.Tensor:
        """The states that every token of a block was drawn from: [N, T, H]."""
        first: torch.Tensor = prefix.last_hidden_state[owner, -1:]  # [N, 1, H]
        fed = pad_sequence([row.tokens[:-1] for row in block], True)  # the last token is predicted, never fed
        if fed.shape[1] == 0:
            return first
        cache = copy.deepcopy(prefix.past_key_values)
        cache.reorder_cache(owner)
        lengths = mask.sum(1)[owner]  # [N]
        rest = self._body(
            input_ids=fed,
            attention_mask=torch.cat([mask[owner], torch.ones_like(fed)], dim=1),
            position_ids=lengths[:, None] + torch.arange(fed.shape[1]),
            past_key_values=cache,
            use_cache=True,
        )
        return torch.cat([first, rest.last_hidden_state], dim=1)

    def _scored(self, row: _Row, states: torch.Tensor) -> Scored:
        """One sample's states [T, H] through the head, a slice of positions at a time."""
        step = max(1, HEAD_LOGITS_MAX // self._vocabulary)
        places = [slice(start, start + step) for start in range(0, len(states), step)]
        parts = [self._slice(states[at], row.tokens[at], row.uniforms[at], row.temperature) for at in places]
        logprobs, below, upto, dictated = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
        return Scored(logprobs, below, upto, dictated)

    def _slice(
        self, states: torch.Tensor, tokens: torch.Tensor, chances: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, ...]:
        """`replay.score` of some positions: states [t, H] → log-probability, below, up to, dictated, [t] each."""
        scores = torch.log_softmax(self._head.logits(states) / temperature, dim=-1)  # [t, V]
        cumulative = scores.exp().double().cumsum(-1)
        total = cumulative[:, -1:]
        if not torch.isfinite(total).all():
            raise AuditFailed("The policy gives probabilities that are not numbers.", hint="Its weights are damaged.")
        target = torch.minimum(chances[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        dictated = torch.searchsorted(cumulative, target, right=True)[:, 0]
        claimed = tokens[:, None]
        upto = cumulative.gather(1, claimed)
        before = cumulative.gather(1, (claimed - 1).clamp(min=0)).where(claimed > 0, 0.0)
        logprobs = scores.gather(1, claimed)[:, 0].double()
        return logprobs, (before / total)[:, 0], (upto / total)[:, 0], dictated

    def _require_right(self, model: Any, folder: Path, nats: float) -> None:
        """Score as the model scores each sample alone, with shared prompts or without, or refuse the policy by name."""
        claims = [
            Prefill(np.array(prompt, np.uint32), [np.arange(length, dtype=np.uint32) for length in lengths], 0, 1.0)
            for prompt, lengths in CHECKED
        ]
        with torch.inference_mode():
            expected = [[_alone(model, claim, tokens) for tokens in claim.completions] for claim in claims]
        reason = ""
        for self.shares_prompts in (True, False):
            try:
                pairs = zip(self.score(claims), expected, strict=True)
                gaps = [abs(one.logprobs - other) for pair in pairs for one, other in zip(*pair, strict=True)]
                if max(float(gap.max()) for gap in gaps) <= nats:
                    return
                reason = "it says something else of many samples at once than of each alone"
            except AuditFailed:
                raise
            except Exception as error:  # nobody can list how models fail that cannot share their prompts
                reason = repr(error)
        raise AuditFailed(f"The policy in {folder} cannot be replayed: {reason}.")


def _alone(model: Any, claim: Prefill, tokens: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Log-probabilities that a model gives one completion."""
    text = torch.from_numpy(np.concatenate([claim.prompt, tokens]).astype(np.int64))
    logits = model(input_ids=text[None], use_cache=False).logits[0, len(claim.prompt) - 1 : -1].float()
    found: NDArray[np.float64] = (
        logits.log_softmax(-1).gather(1, text[len(claim.prompt) :, None])[:, 0].double().numpy()
    )
    return found


def _load(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a policy folder: no network, and no code or pickle from the folder, whatever it says."""
    # Its bar would stand among the findings.
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    with without_adapter(folder) as base:
        _require_borne_out(base)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            base,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    model, report = loaded
    if missing := report["missing_keys"]:  # it would make them up
        raise AuditFailed(f"The policy in {folder} lacks tensors: {', '.join(sorted(missing)[:5])}.")
    adapted = dict[str, Any]()
    with torch.no_grad():
        for name, weight in adapted_weights(folder):
            adapted = adapted or weights_by_stored_name(model)
            adapted[name].copy_(weight)
    return model.eval()


def _require_borne_out(base: Path) -> None:
    """Refuse a configuration that names code, or promises more than its tensors bear out, before that takes memory."""
    config = json.loads(read_at_most(base / "config.json", limits.POLICY_CONFIG_MAX_BYTES))
    policy_config.require_plain(config)
    if reason := architectures.reason_to_refuse(config):
        raise AuditFailed(f"No policy like this one can be audited: {reason}.")
    files = weights.of(base)
    policy_config.require_layers(config, len(weights.shapes(files)))
    described = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(described, trust_remote_code=False)  # type: ignore[no-untyped-call]  # transformers annotates half
    promised = sum(tensor.numel() for tensor in chain(model.parameters(), model.buffers()))
    policy_config.require_borne_out(promised, sum(file.stat().st_size for file in files))


def _rows(claims: Sequence[Prefill], batch: list[int]) -> Iterator[_Row]:
    for place in batch:
        for number, tokens in enumerate(claims[place].completions):
            if not len(tokens):
                continue
            drawn = torch.from_numpy(tokens.astype(np.int64))
            chances = torch.from_numpy(uniforms(claims[place].seed, number, len(tokens)))
            yield _Row(place, number, drawn, chances, claims[place].temperature)


def _batches(claims: Sequence[Prefill]) -> Iterator[list[int]]:
    """The numbers of claims whose prompts fit through the body together, the short ones first."""
    batch: list[int] = []
    for place in sorted(range(len(claims)), key=lambda place: len(claims[place].prompt)):
        if batch and (len(batch) + 1) * len(claims[place].prompt) > BODY_TOKENS_MAX:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _blocks(rows: list[_Row], prompt: int) -> Iterator[list[_Row]]:
    """Rows, the short ones first, that fit through the body together behind a prompt of so many columns."""
    block: list[_Row] = []
    for row in rows:
        if block and (len(block) + 1) * (prompt + len(row.tokens)) > BODY_TOKENS_MAX:
            yield block
            block = []
        block.append(row)
    if block:
        yield block
