"""The log-probabilities of given completions: packed, or in rows if a model's layers would mix packed samples.

- Packed (see `packing`), each prompt is computed once, without padding. Only attention must know about it.
- In rows, each sample is computed after its own copy of the prompt, with samples of similar length, padded on the
  right, which causal layers do not read. Rows are used for layers that carry a state from place to place, for attention
  outside of transformers' interface, and for any other model whose results differ when packed.
- The way is chosen once for each model, by a comparison with each sample alone; a model for which both are wrong is
  refused.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_layers import GradientCheckpointingLayer

from coordinator.model.batch import Tensors
from coordinator.model.head import Head, body_of
from coordinator.model.packing import IMPLEMENTATION, WINDOW, pack, similar
from coordinator.model.products import Products
from protocol.errors import ConfigInvalid
from protocol.policy import model_config

TOLERANCE_NATS = 1e-3
"""The largest difference of the two ways; with the same float32 weights, correct ways agree far better."""

CHECKED_PROMPTS = (6, 3)
"""The lengths of the prompts of the comparison. They and those of the completions are unordered, so that a state which
is carried from one sample to the next is always detected."""

CHECKED_COMPLETIONS = ((5, 1, 7), (2, 8, 3))

CHECKED_WITH = Products()
"""Both ways are compared in float32, in any training precision."""

PACKED_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""The kinds of layers that a packing describes; others may depend on places that a short text does not reach."""

HINT = "docs/architectures.md lists the architectures that can be trained."

NOT_FINITE = "its weights give NaN or infinite log-probabilities"
DIVERGED = "The training has diverged, or the weights are damaged: continue from an older version."

STRIDE = 7919
"""A prime, so that the compared tokens are all different, unless the vocabulary is tiny."""


def require_supported(config: Any) -> None:
    """Refuse a policy by its configuration, before its weights are loaded."""
    if reason := model_config.reason_to_refuse(config.to_dict()):
        raise ConfigInvalid(f"The learner cannot train this policy: {reason}.", hint=HINT)


def sums_in_order(config: Any) -> bool:
    """Return True if a card can compute this model in a fixed order: that of experts and of carried states is not."""
    text = config.get_text_config()
    experts = any("experts" in name and isinstance(value, int) and value > 1 for name, value in vars(text).items())
    carries = any(name.startswith("mamba") for name in vars(text))
    return not experts and not carries and set(getattr(text, "layer_types", None) or ()) <= PACKED_LAYERS


def prepare(model: Any, *, gradient_checkpointing: bool = False) -> None:
    """Choose how the model computes many samples at once, and check that the results equal those of each alone."""
    if gradient_checkpointing:
        compute_layers_twice(model)
    if reason := choose_way(model):
        raise ConfigInvalid(
            f"The learner cannot train a {model.config.model_type} model: {reason}.",
            hint=DIVERGED if reason == NOT_FINITE else HINT,
        )


def choose_way(model: Any) -> str:
    """Choose packed samples, or rows if only they are right; return why neither is right, or ""."""
    usual = model.config._attn_implementation
    data = checked_batch(model.config.get_text_config().vocab_size)
    with torch.no_grad():
        expected = [alone(model, data, row) for row in range(len(data.mask))]
        if not all(bool(row.isfinite().all()) for row in expected):
            return NOT_FINITE
        try:
            model.set_attn_implementation(IMPLEMENTATION)
            if _is_right(model, data, expected) and describes_all(model):
                return ""
        except Exception:  # models fail in many ways on inputs that they do not support
            pass
        model.set_attn_implementation(usual)
        try:
            if _is_right(model, data, expected):
                return ""
            return "its results for many samples at once differ from those for each alone"
        except Exception as error:  # as above
            return f"{type(error).__name__}: {error}"


def compute_layers_twice(model: Any) -> None:
    """Recompute activations in the backward pass; dropout and noise of training mode stay off, as a policy has none."""
    model.activation_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        module.training = isinstance(module, GradientCheckpointingLayer)
        for name, value in vars(module).items():
            if module.training and "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def packs(model: Any) -> bool:
    """Return True if the model's input is packed samples, False if it is rows."""
    return bool(model.config._attn_implementation == IMPLEMENTATION)


def checked_batch(vocabulary: int) -> Tensors:
    """Return the batch of the comparison."""
    tokens = (torch.arange(1, 129) * STRIDE % vocabulary).view(8, 16)
    lengths = [length for lengths in CHECKED_COMPLETIONS for length in lengths]
    mask = pad_sequence([torch.ones(length) for length in lengths], True)
    return Tensors(
        prompts=tuple(tokens[number][:length] for number, length in enumerate(CHECKED_PROMPTS)),
        owners=torch.arange(len(CHECKED_PROMPTS)).repeat_interleave(
            torch.tensor([len(lengths) for lengths in CHECKED_COMPLETIONS])
        ),
        tokens=pad_sequence([tokens[2 + number][:length] for number, length in enumerate(lengths)], True),
        mask=mask,
        behaviour=torch.zeros_like(mask),
        rewards=torch.zeros(len(lengths)),
        weights=torch.ones(len(lengths)),
        taught=mask,
    )


def alone(model: Any, data: Tensors, row: int) -> torch.Tensor:
    """Return the model's log-probabilities of one sample, computed in the ordinary way: [T]."""
    text, tokens = _text(data, row), data.tokens[row, : data.lengths[row]]
    logits = model(input_ids=text[None].to(model.device), use_cache=False).logits[0, -1 - len(tokens) : -1].cpu()
    logprobs: torch.Tensor = logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return logprobs


def describes_all(model: Any) -> bool:
    """Return True if a packing describes all layers; the comparison's short texts do not reach the end of a window."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    slides = "sliding_attention" in kinds or bool(not kinds and getattr(config, "sliding_window", None))
    return kinds <= PACKED_LAYERS and (not slides or any(hasattr(module, WINDOW) for module in model.modules()))


def _is_right(model: Any, data: Tensors, expected: list[torch.Tensor]) -> bool:
    """Return True if the model's results for a batch equal those for each sample alone."""
    everything = torch.arange(len(data.mask))
    # The model's own method, if it has one, gathers sharded weights.
    compute = getattr(model, completion_logprobs.__name__, partial(completion_logprobs, model))
    logprobs, _ = compute(data, everything, CHECKED_WITH)
    wanted = pad_sequence(expected, True)
    return bool(torch.allclose(logprobs.cpu(), wanted, rtol=0.0, atol=TOLERANCE_NATS))


def completion_logprobs(
    model: Any, data: Tensors, chosen: torch.Tensor, products: Products
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of the chosen samples' tokens, and the entropy at each: [n, T'], 0 at padding."""
    chosen = chosen.cpu()  # FSDP moves a method's tensors to the card, and those of `data` stay
    dtype = torch.bfloat16 if products.dtype == "bfloat16" else torch.float32
    # Autocast's cache would keep a bf16 copy of all weights during the whole piece, so it is off.
    with torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16, cache_enabled=False):
        predictions = predict(model, data, chosen)
        logprobs, entropy = Head.for_model(model).selected_logprobs(
            predictions.states,
            predictions.source,
            predictions.targets,
            temperature=products.temperature,
            dtype=dtype,
            entropy_gradient=products.entropy_gradient,
        )
    shape = (len(chosen), int(data.lengths[chosen].max()))
    places = (predictions.places // shape[1], predictions.places % shape[1])
    # New tensors, no views: FSDP attaches hooks to the results of a forward pass.
    table = logprobs.new_zeros(shape).index_put(places, logprobs)
    return table, torch.zeros_like(table).index_put(places, entropy[predictions.source])


class Predictions(NamedTuple):
    """States, and the tokens that they predict."""

    states: torch.Tensor  # [R, H]
    source: torch.Tensor  # [M] the state of each token, ascending
    targets: torch.Tensor  # [M] the token
    places: torch.Tensor  # [M] row · T' + column of the token in the table [n, T']


def predict(model: Any, data: Tensors, chosen: torch.Tensor) -> Predictions:
    """Return the states that predict the tokens of the chosen samples."""
    return (_packed if packs(model) else _in_rows)(model, data, chosen)


def _packed(model: Any, data: Tensors, chosen: torch.Tensor) -> Predictions:
    packing = pack(data, chosen, model.device)
    # A mask in four dimensions is passed through unchanged; packed attention uses its own masks.
    nobody = torch.empty(1, 1, 1, 1, device=model.device)
    states = body_of(model)(
        input_ids=packing.tokens,
        position_ids=packing.positions,
        attention_mask=nobody,
        packing=packing,
        use_cache=False,
    ).last_hidden_state[0]  # [L, H]
    return Predictions(states.index_select(0, packing.rows), packing.source, packing.targets, packing.places)


def _in_rows(model: Any, data: Tensors, chosen: torch.Tensor) -> Predictions:
    body, width = body_of(model), int(data.lengths[chosen].max())
    before = torch.tensor([len(data.prompts[owner]) for owner in data.owners[chosen].tolist()]) - 1
    lengths = before + data.lengths[chosen]  # of the input; the last token is predicted, and is no input
    states, places = [], []
    for rows in similar(lengths):
        texts = [_text(data, int(chosen[row]))[:-1] for row in rows.tolist()]
        computed = body(input_ids=pad_sequence(texts, True).to(model.device), use_cache=False).last_hidden_state
        columns = torch.arange(computed.shape[1]) - before[rows, None]  # [R, W] of the token that a place predicts
        drawn = (columns >= 0) & (columns < data.lengths[chosen[rows], None])
        states.append(computed[drawn.to(model.device)])
        places.append((rows[:, None] * width + columns)[drawn])
    place = torch.cat(places)
    targets = data.tokens[chosen, :width].flatten()[place]
    source = torch.arange(len(place))
    return Predictions(torch.cat(states), *(part.to(model.device) for part in (source, targets, place)))


def _text(data: Tensors, row: int) -> torch.Tensor:
    """Return the tokens of a prompt and its completion."""
    return torch.cat([data.prompts[data.owners[row]], data.tokens[row, : data.lengths[row]]])
