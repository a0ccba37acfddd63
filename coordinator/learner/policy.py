"""The policy in training: weights, optimizer, one update at a time.

- The weights in training are float32; the policy is published in its original type. So an update too small for a bf16
  weight is not lost, but takes effect once enough of them have added up.
- An update is one optimizer step, or several on parts of the batch (`objective.minibatches`). The log-probabilities of
  the whole batch are computed before the first of several steps.
- A step is computed in pieces whose gradients add up to that of the whole. Samples with an advantage of zero are scored
  without a gradient.
- A step whose gradient is not finite is skipped: one absurd reward must not turn every weight into NaN.
- A step whose gradient is zero, such as one whose samples the correction dropped, is a step of AdamW as any other: the
  moments of earlier batches still move the weights a little. If no sample has an advantage, nothing is computed, and
  neither weights nor moments change. Both kinds are counted as empty.
- After a restore the next update is bit for bit the one that would have followed.
- If several ranks train the policy (see `ranks`), each computes some of the pieces, holds its shard of all weights, and
  has every log-probability and every metric afterwards. All of them call the same methods in the same order.

Metrics of an update, besides those of `objective`:

    reward/signal               share of the groups whose raw scores differ
    reward/taught               share of the samples that are judged, chosen, and whose advantage is not 0
    entropy                     of π_old at the sampling temperature, in nats, over all drawn tokens, judged or not
    loss                        of the last step on the batch, before it
    learner/grad_norm           the largest norm of the steps before clipping, of all ranks together
"""

import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from coordinator.base.files import sync
from coordinator.learner import checkpoint
from coordinator.learner.advantages import ended, factors, judged, of_batch, varied
from coordinator.learner.checkpoint import state_root
from coordinator.learner.objective import LossTerms, Metrics, mean, policy_loss, shares
from coordinator.learner.optimizer import MOMENTS, before_first_step, make_optimizer
from coordinator.learner.policy_folders import PolicyWriter
from coordinator.learner.ranks import Ranks
from coordinator.learner.settings import TrainSettings
from coordinator.model.batch import Tensors, collate, minibatches, pieces
from coordinator.model.forward import completion_logprobs, packs, prepare, require_supported, sums_in_order
from coordinator.model.loading import keep_as_published, load_model, return_freed_memory_while_computing
from coordinator.model.lora import TARGETS, Adapters
from protocol.policy import adapter, canary
from protocol.work.learning import TrainingGroup
from swarm_exact import cards

log = logging.getLogger(__name__)

RANDOM = "random"


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of one update."""

    metrics: Metrics
    distances: dict[str, float]
    """Claim id → mean |log π/μ| over its tokens: large where the claimed log-probabilities cannot be true."""


class TrainedPolicy:
    """A model from a hub-format folder, and the optimizer that changes it."""

    def __init__(self, folder: Path, settings: TrainSettings, ranks: Ranks | None = None) -> None:
        self._folder = folder
        self._settings = settings
        self._ranks = ranks or Ranks(settings.device)
        described = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        require_supported(described)
        cards.compute_in_full(self._ranks.device)
        self._in_order = sums_in_order(described)
        self._published_dtype: torch.dtype = described.dtype or torch.float32
        self.model = self._load(folder, trained=not settings.lora_rank)
        self._reference = self._load(folder, trained=False) if settings.algorithm.beta else None
        self._adapters = self._adapt() if settings.lora_rank else None
        self._trained = dict((self._adapters or self.model).named_parameters())
        self._optimizer = make_optimizer(self.model, self._trained, settings)
        self.writer = PolicyWriter(self.model, self._adapters, self._ranks, source=folder, dtype=self._published_dtype)
        ends = self.model.generation_config.eos_token_id
        if ends is None:  # 0 is a valid token, so `or` would be wrong
            ends = self.model.config.eos_token_id
        self.ends: list[int] = [ends] if isinstance(ends, int) else list(ends or ())
        """Tokens that end a completion."""
        self.update = 0
        """Updates made so far."""
        self.before_change: Callable[[], None] = _unread
        """Called before weights change; it waits for the thread that reads them."""

    def _adapt(self) -> Adapters:
        settings = self._settings
        targets, least = settings.lora_targets or TARGETS, settings.lora_coverage_min
        adapters = Adapters(self.model, settings.lora_rank, settings.lora_alpha, targets, coverage_min=least)
        if self._ranks.first:
            log.info("adapters cover %.1f %% of the weights of the model's matrices", 100 * adapters.coverage)
        return adapters

    @property
    def steps(self) -> int:
        """Return the number of steps in the optimizer's state."""
        return max((int(state["step"]) for state in self._optimizer.state.values()), default=0)

    def _load(self, folder: Path, *, trained: bool) -> Any:
        def lay_out(model: Any) -> None:
            if not trained:
                keep_as_published(model, self._published_dtype)
            self._ranks.shard(model)

        model = load_model(folder, lay_out).to(self._ranks.device)
        self._ranks.forward(model, completion_logprobs)
        prepare(model, gradient_checkpointing=self._settings.gradient_checkpointing)
        return_freed_memory_while_computing(model)
        return model

    def continue_from(self, folder: Path) -> None:
        """Continue from a published version's weights, at the same update.

        The optimizer's state belongs to the replaced weights and is deleted: its first steps are small again.
        """
        self.before_change()
        self._optimizer.state.clear()
        if self._adapters:
            self._adapters.continue_from(load_file(folder / adapter.WEIGHTS), (folder / adapter.CONFIG).read_bytes())
        else:
            other = self._load(folder, trained=True)
            with torch.no_grad():
                for ours, theirs in zip(self.model.parameters(), other.parameters(), strict=True):
                    ours.copy_(theirs)
                for ours, theirs in zip(self.model.buffers(), other.buffers(), strict=True):
                    ours.copy_(theirs)

    def start_here(self) -> None:
        """Make the current policy the starting policy and the reference, also after a resume."""
        draft = self._folder.with_name(f"{self._folder.name}.new")
        if self._ranks.first:
            shutil.rmtree(draft, ignore_errors=True)
        self.writer.save_hub(draft)
        if self._ranks.first:
            (draft / canary.FILE_NAME).unlink()
            for path in draft.iterdir():
                sync(path)
            shutil.rmtree(self._folder)
            draft.rename(self._folder)
            sync(self._folder.parent)
        self._ranks.meet()
        if self._reference is not None:
            self._reference = self._load(self._folder, trained=False)

    def train_step(self, groups: Sequence[TrainingGroup]) -> UpdateResult:
        """Make one update on these groups, to the same bits on each card of a kind."""
        with cards.computing_repeatably(self._ranks.device, strictly=self._in_order):
            return self._train_step(groups)

    def _train_step(self, groups: Sequence[TrainingGroup]) -> UpdateResult:
        data = collate(groups)
        terms = self._terms(data)
        entropy = torch.zeros_like(data.mask)  # [N, T] of π_old; filled in by the pass that computes log π_old
        parts = minibatches(data, self._settings.algorithm.minibatches)
        if len(parts) > 1:  # the first step changes the policy before the other parts are computed
            terms = replace(terms, old=self.logprobs(data, entropy))
        current = torch.zeros_like(data.mask) if terms.old is None else terms.old  # [N, T] the last log π_θ
        rate = self._settings.rate(self.update, self.steps)
        norms, skipped, empty = list[float](), 0, 0
        for part in parts * self._settings.num_iterations:
            self._optimizer.zero_grad()
            logprobs = self._gradient(data, self._minibatch_terms(terms, part), part, entropy)
            if terms.old is None:  # before the first step of the only part, π_θ is π_old
                terms = replace(terms, old=logprobs)
            current = torch.where(part[:, None], logprobs, current)
            norm = self._ranks.clip(list(self._trained.values()), self._settings.max_grad_norm)
            norms.append(norm)
            for parameters in self._optimizer.param_groups:
                parameters["lr"] = rate
            empty += norm == 0.0
            if isfinite(norm):  # otherwise every weight would become NaN, also in the next checkpoint
                self.before_change()
                self._optimizer.step()
            else:
                skipped += 1
        self._optimizer.zero_grad()  # a gradient is as large as the weights, and is not needed until the next update
        self.update += 1
        _, metrics = policy_loss(current, terms, self._settings.algorithm, entropy)
        metrics |= {
            "learner/grad_norm": max(filter(isfinite, norms), default=norms[-1]),
            "learner/skipped": float(skipped),
            "learner/empty": float(empty),
            "learner/learning_rate": rate,
            "entropy": mean(entropy, data.mask),
            **self._batch_metrics(data, terms.advantages, len(groups)),
        }
        assert terms.old is not None
        return UpdateResult(metrics, _distances(groups, data, terms.old))

    def _batch_metrics(self, data: Tensors, advantages: torch.Tensor, groups: int) -> Metrics:
        """Return the rewards of a batch, how many samples teach, and their lengths in drawn tokens."""
        lengths = data.mask.sum(1)
        return {
            "reward/mean": float(data.rewards.mean()),
            "reward/std": float(data.rewards.std(correction=0)),
            "reward/signal": float(varied(data.rewards, data.owners, groups).float().mean()),
            "reward/taught": float((advantages != 0).float().mean()),
            "samples": float(len(data.rewards)),
            "tokens": float(data.mask.sum()),
            "length/mean": float(lengths.mean()),
            "length/max": float(lengths.max()),
            "length/truncated": 1.0 - float(ended(data, self.ends).float().mean()),
        }

    def _terms(self, data: Tensors) -> LossTerms:
        """Return the terms of the loss that do not depend on the policy's log-probabilities."""
        algorithm, longest = self._settings.algorithm, self._settings.max_completion_length
        counts = judged(data, algorithm, ends=self.ends)
        mask = data.taught * counts[:, None]
        advantages = of_batch(data, counts, algorithm, longest=longest)
        chosen = factors(advantages, data.owners, algorithm, seed=self._settings.seed, update=self.update)
        return LossTerms(
            behaviour=data.behaviour,
            mask=mask,
            shares=shares(mask, algorithm, longest=longest),
            advantages=advantages * chosen,
            reference=self._reference_logprobs(data),
        )

    def _minibatch_terms(self, terms: LossTerms, part: torch.Tensor) -> LossTerms:
        """Return the terms of some samples as those of a whole batch: the shares of these samples add up to one."""
        settings = self._settings
        mask = terms.mask * part[:, None]
        return replace(terms, shares=shares(mask, settings.algorithm, longest=settings.max_completion_length))

    def _reference_logprobs(self, data: Tensors) -> torch.Tensor | None:
        return None if self._reference is None else self._logprobs_of(self._reference, data)

    def logprobs(self, data: Tensors, entropy: torch.Tensor | None = None) -> torch.Tensor:
        """Score all samples with the current policy: → [N, T]. `entropy` is filled in if it is given."""
        return self._logprobs_of(self.model, data, entropy)

    def _logprobs_of(self, model: Any, data: Tensors, entropy: torch.Tensor | None = None) -> torch.Tensor:
        table = torch.zeros_like(data.mask)
        with torch.no_grad():
            for piece, ours in self._pieces(data, torch.arange(len(data.mask))):
                logprobs, entropies = model.completion_logprobs(data, piece, self._settings.products)
                if ours:
                    table[piece, : logprobs.shape[1]] = logprobs.cpu()
                    if entropy is not None:
                        entropy[piece, : logprobs.shape[1]] = entropies.cpu()
        if entropy is not None:
            self._ranks.total(entropy)
        return self._ranks.total(table)

    def _pieces(self, data: Tensors, chosen: torch.Tensor) -> Iterator[tuple[torch.Tensor, bool]]:
        """Yield this rank's pieces of the chosen samples; others' pieces are computed only to stay in step."""
        most, packed = self._settings.micro_batch_tokens, packs(self.model)
        return self._ranks.deal(pieces(data, chosen, most, hands=self._ranks.size, packed=packed))

    def _gradient(self, data: Tensors, terms: LossTerms, part: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        """Add up the gradients of the pieces of some samples: → [N, T] log π_θ of these samples.

        If log π_old is not known yet, this pass is the one that computes it: it also scores the samples that have no
        gradient, and fills in the entropy.
        """
        settings, first = self._settings, terms.old is None
        table = torch.zeros_like(data.mask)
        # Without an advantage, only the divergence from the reference and the entropy bonus have a gradient.
        all_teach = terms.reference is not None or settings.algorithm.entropy_bonus > 0
        teaches = (terms.advantages != 0) | all_teach
        passes = ((True, part & teaches), (False, part & ~teaches)) if first else ((True, part & teaches),)
        for learning, rows in passes:
            with torch.set_grad_enabled(learning):
                for piece, ours in self._pieces(data, rows.nonzero()[:, 0]):
                    logprobs, entropies = self.model.completion_logprobs(data, piece, settings.products)
                    logprobs, entropies, width = logprobs.cpu(), entropies.cpu(), logprobs.shape[1]
                    if learning:
                        loss, _ = policy_loss(logprobs, terms.rows(piece, width), settings.algorithm, entropies)
                        # Shares refer to the whole batch, and the ranks' gradients are averaged.
                        whole = loss * self._ranks.size * ours
                        whole.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
                    if ours:
                        table[piece, :width] = logprobs.detach()
                        if first:
                            entropy[piece, :width] = entropies.detach()
        self._ranks.join_gradients(list(self._trained.values()))
        if first:
            self._ranks.total(entropy)
        self._ranks.total(table)
        return table if terms.old is None else torch.where(teaches[:, None], table, terms.old)

    def save(self, folder: Path, **beside: Any) -> None:
        """Write a checkpoint: all that the next update depends on, and the plain values in `beside`."""
        self.saving(folder, **beside)()()

    def saving(
        self, folder: Path, drawn: Collection[int] | None = None, dense: int = 0, **beside: Any
    ) -> Callable[[], Callable[[], None]]:
        """Return the job that writes a checkpoint of this moment; it must run before any weight changes.

        It returns the job that makes the checkpoint durable, which does not read the weights. `drawn` and `dense` say
        which older checkpoints are kept (`checkpoint.needed`).
        """
        beside |= {"update": self.update, "steps": self.steps}
        return partial(checkpoint.write, folder, self.update, self._tensors(), beside, self._ranks, drawn, dense)

    def rooting(self) -> Callable[[], str]:
        """Return the job that computes the root of the present state; it must run before any weight changes."""
        return partial(state_root, self._tensors(), self.update, self.steps, self._ranks)

    def restore(self, path: Path) -> dict[str, Any]:
        """Continue from a checkpoint of the same model; return its plain values."""
        self.before_change()
        beside = checkpoint.read_beside(path)
        self._optimizer.state.clear()
        if steps := beside["steps"]:
            for weight in self._trained.values():
                self._optimizer.state[weight] = before_first_step(self._optimizer, weight, steps)
        tensors = self._tensors()
        checkpoint.read_tensors(path, tensors, self._ranks)
        torch.set_rng_state(tensors[RANDOM])
        self.update = beside["update"]
        return beside

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint, which are those in use; all ranks have rank 0's random state.

        Any rank may write it, and the root has rank 0's: a checkpoint with another rank's would have another root.
        """
        tensors = {f"weight.{name}": weight.detach() for name, weight in self._trained.items()}
        for name, weight in self._trained.items():
            state = self._optimizer.state.get(weight, {})
            tensors |= {f"{moment}.{name}": state[moment] for moment in MOMENTS if state}
        return tensors | {RANDOM: self._ranks.broadcast(torch.get_rng_state())}


def _unread() -> None:
    """Return at once: no other thread reads the weights."""


def _distances(groups: Sequence[TrainingGroup], data: Tensors, old: torch.Tensor) -> dict[str, float]:
    """Return the mean |log π_old/μ| over the tokens of each claim; the claims of a group follow each other."""
    gap = (old - data.behaviour).abs()  # [N, T]
    places = torch.arange(gap.shape[1])
    distances: dict[str, float] = {}
    for number, group in enumerate(groups):
        rows = data.owners == number
        start = torch.zeros(len(group.samples), 1)
        for claim_id, ends in [
            *((earlier.claim_id, earlier.ends) for earlier in group.earlier),
            (group.claim_id, None),
        ]:
            end = torch.tensor(ends or [gap.shape[1]] * len(group.samples))[:, None]
            own = data.mask[rows] * ((places >= start) & (places < end))  # [samples, T]
            distances[claim_id] = mean(gap[rows], own)
            start = end
    return distances
