"""What a policy says of completions that are given: packed, or in rows where a model's layers would mix what is packed.

- Packed (see `packing`), each prompt is computed once, and nothing is padding. Attention alone must know of it.
- In rows, each sample is computed behind a prompt of its own, beside samples of similar length, padded on the right,
  where nothing looks that is causal. So are computed: layers that carry a state from place to place, attention that
  does not go through transformers' interface, and whatever else is found to say something else when packed.
- Which of the two is found out once for each model, by a comparison with each sample alone; a model that both get wrong
  is refused.
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
from protocol.policy import architectures

TOLERANCE_NATS = 1e-3
"""Two ways through the same float32 weights agree far better than this."""

CHECKED_PROMPTS = (6, 3)
"""Lengths of the prompts that the two ways are compared on; with those of their completions, in no order, nothing that
is carried from one sample to the next stays unseen."""

CHECKED_COMPLETIONS = ((5, 1, 7), (2, 8, 3))

CHECKED_WITH = Products()
"""Both ways are compared in float32, whatever is trained in."""

PACKED_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that a packing describes; what others see may depend on places that no short text reaches."""

HINT = "docs/architectures.md lists the architectures that can be trained."

STRIDE = 7919
"""A prime: tokens that are compared are all different unless the vocabulary is tiny."""


def require_supported(config: Any) -> None:
    """Refuse a policy by its configuration, before its weights are loaded."""
    if reason := architectures.reason_to_refuse(config.to_dict()):
        raise ConfigInvalid(f"The learner cannot train this policy: {reason}.", hint=HINT)


def prepare(model: Any, *, gradient_checkpointing: bool = False) -> None:
    """Have the model compute many samples at once, and make sure that it says of them what it says of each alone."""
    if gradient_checkpointing:
        compute_layers_twice(model)
    if reason := choose_way(model):
        raise ConfigInvalid(
            f"The learner cannot train a {model.config.model_type} model: {reason}.",
            hint=HINT,
        )


def choose_way(model: Any) -> str:
    """Have the model compute samples packed, or in rows where only that is right; return why neither is, or nothing."""
    usual = model.config._attn_implementation
    data = checked_batch(model.config.get_text_config().vocab_size)
    with torch.no_grad():
        expected = [alone(model, data, row) for row in range(len(data.mask))]
        try:
            model.set_attn_implementation(IMPLEMENTATION)
            if _is_right(model, data, expected) and describes_all(model):
                return ""
        except Exception:  # nobody can list how models fail that are fed what they do not know
            pass
        model.set_attn_implementation(usual)
        try:
            if _is_right(model, data, expected):
                return ""
            return "many samples at once, it computes something else than for each alone"
        except Exception as error:  # as above
            return f"{type(error).__name__}: {error}"


def compute_layers_twice(model: Any) -> None:
    """Recompute activations on the way back; of training itself, nothing: dropout and noise belong to no policy."""
    model.activation_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        module.training = isinstance(module, GradientCheckpointingLayer)
        for name, value in vars(module).items():
            if module.training and "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def packs(model: Any) -> bool:
    """Return True if the model is fed packed samples, False if it is fed rows."""
    return bool(model.config._attn_implementation == IMPLEMENTATION)


def checked_batch(vocabulary: int) -> Tensors:
    """A batch to compare by."""
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
    """What the model says of one sample, as whoever runs it would compute it: [T]."""
    text, tokens = _text(data, row), data.tokens[row, : data.lengths[row]]
    logits = model(input_ids=text[None].to(model.device), use_cache=False).logits[0, -1 - len(tokens) : -1].cpu()
    found: torch.Tensor = logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return found


def describes_all(model: Any) -> bool:
    """Return True if a packing says of every layer what it sees: short texts do not reach the end of a window."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    slides = "sliding_attention" in kinds or bool(not kinds and getattr(config, "sliding_window", None))
    return kinds <= PACKED_LAYERS and (not slides or any(hasattr(module, WINDOW) for module in model.modules()))


def _is_right(model: Any, data: Tensors, expected: list[torch.Tensor]) -> bool:
    """Return True if the model, as it stands, says of a batch what it says of each sample alone."""
    everything = torch.arange(len(data.mask))
    # The model's own method, where it has one, gathers weights that lie in shards.
    compute = getattr(model, completion_logprobs.__name__, partial(completion_logprobs, model))
    found, _ = compute(data, everything, CHECKED_WITH)
    wanted = pad_sequence(expected, True)
    return bool(torch.allclose(found.cpu(), wanted, rtol=0.0, atol=TOLERANCE_NATS))


def completion_logprobs(
    model: Any, data: Tensors, chosen: torch.Tensor, products: Products
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the chosen samples' tokens, and the entropy at each: [n, T'] each, 0 at padding."""
    dtype = torch.bfloat16 if products.dtype == "bfloat16" else torch.float32
    # Without autocast's cache, which would keep a bf16 copy of all weights for as long as a piece is computed.
    with torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16, cache_enabled=False):
        found = predict(model, data, chosen)
        logprobs, entropy = Head.for_model(model).selected_logprobs(
            found.states,
            found.source,
            found.targets,
            temperature=products.temperature,
            dtype=dtype,
            entropy_gradient=products.entropy_gradient,
        )
    shape = (len(chosen), int(data.lengths[chosen].max()))
    places = (found.places // shape[1], found.places % shape[1])
    # Fresh tensors, no views: FSDP hangs its hooks on what a forward pass returns.
    table = logprobs.new_zeros(shape).index_put(places, logprobs)
    return table, torch.zeros_like(table).index_put(places, entropy[found.source])


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
    # A mask in four dimensions is taken as it is; attention has its own idea of who sees whom.
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
    lengths = before + data.lengths[chosen]  # fed; the last token is predicted, never fed
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
    """A prompt and its completion."""
    return torch.cat([data.prompts[data.owners[row]], data.tokens[row, : data.lengths[row]]])
