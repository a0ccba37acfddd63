"""The memory that a learner and an auditor need, from a configuration alone.

A learner, by phase on each card, on the host, and on the disk:

    load                   the weights, and the temporary memory of loading
    self-check             many samples at once compared with each alone, once
    forward and backward   weights, moments, gradients, the activations of the largest piece; on one rank, the canary
                           or a weight of the version that is published meanwhile
    optimizer step         weights, moments, gradients
    publication            one weight at a time in the type in which it is published
    canary                 one layer at a time as it is published, and the logits of the canary's text

An auditor, by phase, where it computes:

    load          the versions that it compares, and the largest weight while the last one is loaded
    self-check    the versions, and many samples at once compared with each alone
    replay        the versions, the activations of the fullest pass, and a slice of its logits
    rounding      the same beside a version in 16 bits, whose honest samples it measures

- Weights and activations are measured on a model of fake tensors (see `simulated`); of a slice of logits, copies are
  counted; the rest is computed here.
- If ranks share the weights (FSDP2), each holds its part of weights, moments and gradients, and for a while also the
  weights that it gathers: those outside of the layers, and some layers. Their number was measured with two ranks.
- The allocator's losses are not included: see `Cards.usable_bytes` in `memory_plan`.
- An auditor's weights for a card pass through the memory of the machine while they are loaded. Its replays to the bit
  (classes `exact`) are not included: they take two more versions in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil, log2
from typing import Any

import torch
from transformers import AutoConfig

from coordinator.audit.rounding import PRECISIONS
from coordinator.audit.scorer import BLOCK, BODY_TOKENS_MAX, HEAD_LOGITS_MAX
from coordinator.config import Config
from coordinator.learner import start
from coordinator.learner.optimizer import COPIES_BYTES
from coordinator.learner.settings import TrainSettings, train_settings
from coordinator.learner.simulated import MEASURED_LAYERS, PhasedNeed, SimulatedModel, SimulatedPolicy
from coordinator.model.batch import Tensors
from coordinator.model.forward import predict, require_supported
from coordinator.model.head import Head
from protocol import limits
from protocol.errors import ConfigInvalid

PROCESS_BYTES = {"cpu": 700 * 2**20, "cuda": 3 * 2**30}
"""Memory of a process with torch and transformers, without any tensor; CUDA's libraries take more."""

ROUNDED_BYTES = 2
"""Bytes of a number in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class AuditorNeed(PhasedNeed):
    """The bytes that an auditor needs; phases are those of tensors on its device."""

    device: str
    dtype: str
    parameters: int
    loaded_bytes: int
    """Bytes of one version."""

    @property
    def on_card(self) -> bool:
        return self.device != "cpu"

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the machine's memory; weights for a card pass through it."""
        kind = self.device.partition(":")[0]
        return PROCESS_BYTES[kind] + (self.loaded_bytes if self.on_card else self.peak_bytes)

    @property
    def place(self) -> str:
        """Return how the auditor computes, and where: `float32 on cuda:1`."""
        return f"{self.dtype} on {self.device}"


class SimulatedReplay(SimulatedModel):
    """A model of fake tensors in the layout of an auditor's version."""

    def __init__(self, described: Any) -> None:
        super().__init__(described, narrow=True)
        self.self_check_bytes = self.choose_attention()  # first: all else is measured with it

    def replayed(self, data: Tensors, *, on_card: bool) -> int:
        """Return the peak of one pass over `data`; layers add no memory, since nothing is kept for a gradient."""
        if self.is_uniform:
            self.cut(MEASURED_LAYERS[1])

        def work() -> None:
            with torch.no_grad():
                found = predict(self.model, data, torch.arange(len(data.mask)))
                words = int(self.model.get_output_embeddings().weight.shape[0])
                count = min(max(1, HEAD_LOGITS_MAX // words), len(found.source))
                Head.for_model(self.model).logits(found.states[found.source[:count]])
                torch.empty(count, scored_bytes(words), dtype=torch.uint8, device="meta")

        return self._peak(work, on_card=on_card)


def scored_bytes(words: int) -> int:
    """Return the bytes of a position in `score_positions`, with a temperature of the lease's own, at its two peaks.

    Edges: logits, log-probabilities at both temperatures, one copy that is masked, that of torch's logsumexp, and four
    masks, which take a quarter each. Pick: the first three, the probabilities in blocks, and three blocks in float64.
    """
    return max(6 * 4 * words, 4 * 4 * words + 3 * 8 * BLOCK)


def auditor_need(config: Config, described: Any, fullest: Tensors, *, device: str | None = None) -> AuditorNeed:
    """Return the bytes that the round's auditor needs for its `fullest` pass, or one on another `device`."""
    place = device or config.audit.device
    model = SimulatedReplay(described)
    replay = model.replayed(fullest, on_card=place != "cpu")
    versions = limits.AUDITOR_VERSIONS_MAX * model.weights_bytes
    largest = max(weight.nbytes for weight in model.model.parameters())
    phases = {"load": versions + largest, "self-check": versions + model.self_check_bytes, "replay": versions + replay}
    if measures_rounding(config.audit.classes):
        phases["rounding"] = phases["replay"] + ROUNDED_BYTES * model.parameters
    return AuditorNeed(
        device=place,
        dtype=config.audit.dtype,
        parameters=model.parameters,
        phases=phases,
        loaded_bytes=model.weights_bytes,
    )


def measures_rounding(classes: Sequence[str]) -> bool:
    """Return True if nodes in 16 bits may be admitted."""
    return not classes or any(PRECISIONS & set(name.split("/")) for name in classes)


PROMPT_TOKENS = 512
"""The assumed length of each prompt. Its effect is small: `micro_batch_tokens` bounds prompts and completions."""

WIDEST = 4
"""Bytes of a float32 number: the type of all that the learner trains."""

CHECKPOINTS_AT_ONCE = 2
"""The last checkpoint, and the next while it is written."""


def described(config: Config) -> Any:
    """Return the content of config.json of the round's policy."""
    file = start.configuration_file(config.model)
    if file is None:
        raise ConfigInvalid("The embedded policy fits anywhere.", hint="Name another by model.path or `plan --model`.")
    configuration = AutoConfig.from_pretrained(file, local_files_only=True)
    require_supported(configuration)
    return configuration


@dataclass(frozen=True)
class LargestBatch:
    """The largest amount of text in an update."""

    groups: int
    samples: int
    prompt: int = PROMPT_TOKENS

    @staticmethod
    def from_config(config: Config, prompt: int = PROMPT_TOKENS) -> "LargestBatch":
        return LargestBatch(config.learner.groups_per_update, config.sampling.samples_per_group, prompt)

    def at_most(self, groups: int) -> "LargestBatch":
        """Return a batch of so many groups, of the same size each."""
        return replace(self, groups=groups)

    def fullest_piece(self, tokens_max: int, length: int) -> Tensors:
        """Return a piece of at most `tokens_max` tokens with the most samples of `length`; 0: no bound.

        Prompts differ in length by one, so that masks have a row for each sample. Masks are real tensors in a
        simulation, so without a bound for a piece all prompts have the same length and masks have one row.
        """
        uneven = 1 if tokens_max else 0
        room = tokens_max or self.groups * (self.prompt + self.samples * length)
        owners: list[int] = []
        for group in range(self.groups):
            for number in range(self.samples):
                room -= length + (0 if number else self.prompt)
                if owners and room < 0:
                    break
                owners.append(group)
        mask = torch.ones(len(owners), length)
        return Tensors(
            prompts=tuple(
                torch.zeros(max(1, self.prompt - uneven * (group % 2)), dtype=torch.long) for group in set(owners)
            ),
            owners=torch.tensor(owners),
            tokens=mask.long(),
            mask=mask,
            behaviour=mask,
            rewards=mask[:, 0],
            weights=mask[:, 0],
            taught=mask,
        )

    def tokens(self, settings: TrainSettings) -> int:
        """Return the number of tokens of the whole batch."""
        return self.groups * (self.prompt + self.samples * settings.max_completion_length)


@dataclass(frozen=True, kw_only=True)
class Footprint(PhasedNeed):
    """The bytes that one way to train needs; phases are those on each card."""

    ranks: int
    parameters: int
    trained: int
    """Numbers that the optimizer changes."""
    host_bytes: int
    """Bytes of the machine's memory that all ranks need; on the CPU, they compute in it."""
    disk_bytes: int


class Simulations:
    """The simulated policies of one model.

    Ways to train that need the same simulation share a policy and its measurements: full weights, or
    adapters of one shape, are laid out once; the storage of the optimizer's moments changes no activation.
    """

    def __init__(self, model: Any) -> None:
        self.dtype: torch.dtype = model.dtype or torch.float32
        self._model = model
        self._policies: dict[Any, SimulatedPolicy] = {}
        self._auditors: dict[str, AuditorNeed] = {}
        self._activations: dict[Any, tuple[int, int]] = {}

    def policy(self, settings: TrainSettings) -> SimulatedPolicy:
        """Return the policy that these settings train."""
        key = (settings.lora_rank, settings.lora_alpha, settings.lora_targets) if settings.lora_rank else None
        if key not in self._policies:
            self._policies[key] = SimulatedPolicy(self._model, settings)
        return self._policies[key]

    def auditor(self, config: Config, prompt: int = PROMPT_TOKENS, device: str = "") -> AuditorNeed:
        """Return the bytes that the round's auditor needs on its device, or on another `device`."""
        place = device or config.audit.device
        if place not in self._auditors:
            batch = LargestBatch.from_config(config, prompt).at_most(limits.AUDITOR_CASES_AT_ONCE)
            fullest = batch.fullest_piece(BODY_TOKENS_MAX, config.sampling.max_new_tokens)
            self._auditors[place] = auditor_need(config, self._model, fullest, device=place)
        return self._auditors[place]

    def activations(self, settings: TrainSettings, batch: LargestBatch) -> tuple[int, int]:
        """Return the bytes of activations of a piece, and those of one layer among them."""
        key = (replace(settings, optimizer_dtype="float32", optimizer_offload=False), batch)
        if key not in self._activations:
            piece = batch.fullest_piece(settings.micro_batch_tokens, settings.max_completion_length)
            self._activations[key] = _activations(self.policy(settings), settings, piece)
        return self._activations[key]


def _activations(policy: SimulatedPolicy, settings: TrainSettings, piece: Tensors) -> tuple[int, int]:
    """Measure a piece. If all layers are alike, each adds the same activations, so a few layers are enough."""
    layers = len(policy.layer_bytes)
    most, few = MEASURED_LAYERS
    if not policy.is_uniform or layers <= most:
        policy.cut(layers)
        total = policy.learned(piece, settings)
        return total, total // layers
    policy.cut(most)
    higher = policy.learned(piece, settings)
    policy.cut(few)
    each = (higher - policy.learned(piece, settings)) // (most - few)
    return higher + (layers - most) * each, each


class Estimate:
    """The memory of one model and one way to train it; parts that depend on the ranks are computed for each number."""

    def __init__(
        self, simulations: Simulations, settings: TrainSettings, batch: LargestBatch, *, publishes_adapters: bool = True
    ) -> None:
        self._settings = settings
        self._merged = bool(settings.lora_rank) and not publishes_adapters
        policy = simulations.policy(settings)
        self.parameters = policy.parameters
        self.published_bytes: int = self.parameters * simulations.dtype.itemsize
        self._weights_bytes, self._trained_bytes = policy.weights_bytes, policy.trained_bytes
        self._layer: int = max(policy.layer_bytes)
        self._layers: int = sum(policy.layer_bytes)
        self._outside: int = policy.weights_bytes - self._layers
        self._largest: int = max(weight.nbytes for weight in policy.model.parameters())
        self._several = batch.tokens(settings) > (settings.micro_batch_tokens or batch.tokens(settings))
        self._simulated = partial(simulations.activations, settings, batch)
        self._moments = 2 * getattr(torch, settings.optimizer_dtype).itemsize / WIDEST  # times the weights
        is_small = settings.optimizer_dtype != "float32" or settings.optimizer_offload
        self._changed = min(COPIES_BYTES, 5 * max(weight.nbytes for weight in policy.trained)) if is_small else 0
        self._policy = policy
        self._written = policy.published(merged=self._merged)

    @cached_property
    def _beside(self) -> int:
        """Bytes of a version that is scored and written during the next update; adapters are written before it."""
        goes_beside = self._merged or not self._settings.lora_rank
        return max(self._written, self._policy.canary) if goes_beside else 0

    def least_bytes(self, ranks: int) -> int:
        """Return the bytes of weights and gradients on each card, which need no simulation."""
        return sum(self._laid_out(ranks))

    def _laid_out(self, ranks: int) -> tuple[int, int]:
        """Return the bytes of a rank's weights, adapters included, and of the weights that it trains."""
        lora = bool(self._settings.lora_rank)
        own = self._trained_bytes if lora else ceil(self._trained_bytes / ranks)  # adapters lie everywhere
        return ceil(self._weights_bytes / ranks) + (own if lora else 0), own

    def _learned(self, own: int, ranks: int) -> int:
        """Return the peak of gradients and activations on a rank whose gradients have the size `own`.

        Activations are freed while gradients are computed. From the second piece on, all gradients exist from the
        start. Several ranks also gather a layer and the weights outside of layers, and hold their part of new gradients
        until the end.
        """
        activations, of_layer = self._simulated()
        if ranks > 1:
            layers = 4 * self._layer if self._settings.lora_rank else self._layer + ceil(self._layers / ranks)
            return own + activations + self._outside + layers
        if self._several:
            return own + activations + self._beside
        return max(activations, own + of_layer + self._largest) + self._beside

    def _computed(self, peak: int, ranks: int) -> int:
        """Return the peak of computing without a gradient; ranks gather weights outside of layers, then some layers."""
        if ranks == 1:
            return peak
        first = 2 * self._outside + (self._largest if self._settings.lora_rank else peak)
        return max(first, peak + self._outside + 3 * self._layer)

    def footprint(self, ranks: int, *, device: str, versions: int = 1, checkpoints: int = 0) -> Footprint:
        """Return the bytes for `ranks` ranks, with the whole versions and older checkpoints that the round keeps."""
        lora, trained = bool(self._settings.lora_rank), self._trained_bytes
        weights, own = self._laid_out(ranks)
        reference = ceil(self.published_bytes / ranks) if self._settings.algorithm.beta else 0
        moments = int(self._moments * own)
        offloads = self._settings.optimizer_offload and device != "cpu"
        held = weights + reference + (0 if offloads else moments)
        phases = {
            "load": weights + reference + (0 if lora else ceil(self._largest / ranks)),
            "self-check": weights + reference + self._computed(self._policy.self_check_bytes, ranks),
            "forward and backward": held + self._learned(own, ranks),
            "optimizer step": held + own + self._changed,
            "publication": held + self._written * (1 if ranks == 1 else 2),
            "canary": held + self._computed(self._policy.canary, ranks),
        }
        return Footprint(
            ranks=ranks,
            parameters=self.parameters,
            trained=trained // WIDEST,
            phases=phases,
            host_bytes=ranks * PROCESS_BYTES[device.partition(":")[0]]
            + (moments if offloads else 0)
            + self._host(ranks, device, phases),
            disk_bytes=self._disk(versions, checkpoints),
        )

    def _host(self, ranks: int, device: str, phases: dict[str, int]) -> int:
        """Return the bytes of tensors in the machine's memory; weights for cards pass through it during loading."""
        if device == "cpu":
            return ranks * max(phases.values())
        return 0 if self._settings.lora_rank else self._weights_bytes

    def _disk(self, versions: int, checkpoints: int) -> int:
        """Return the bytes of the starting policy, checkpoints, the version being written and those that are kept."""
        whole = 3 + (0 if self._settings.lora_rank and not self._merged else versions)
        states = CHECKPOINTS_AT_ONCE + checkpoints
        return whole * self.published_bytes + int(states * (1 + self._moments) * self._trained_bytes)


def estimate(config: Config, simulations: Simulations, *, prompt: int = PROMPT_TOKENS, **changes: Any) -> Estimate:
    """Return the estimate of a round's learner, with `changes` to its settings in `[learner]`."""
    settings = replace(train_settings(config), **changes)
    return Estimate(
        simulations,
        settings,
        LargestBatch.from_config(config, prompt),
        publishes_adapters=config.learner.publish_adapters,
    )


def kept_checkpoints(config: Config) -> int:
    """Return the most older checkpoints that a round keeps for retractions (`checkpoint.thinned`)."""
    dense = config.learner.kept_checkpoints
    written = config.round.max_updates // config.staleness.kappa + 1
    return min(written, dense + 1 + ceil(2 * log2(written / dense + 1))) if dense else 0


def kept_versions(config: Config) -> int:
    """Return the number of versions that a round keeps whole: for rollouts within S, for rollback, and a new one."""
    return config.staleness.max_updates // config.staleness.kappa + config.publish.keep + 2
