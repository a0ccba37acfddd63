"""What a policy says of completions that are given: packed, each prompt computed once, in pieces of bounded size."""

from functools import partial
from typing import Any

import torch

from coordinator.learner.batch import Tensors
from coordinator.learner.head import selected_logprobs
from coordinator.learner.packing import IMPLEMENTATION, pack
from coordinator.learner.settings import TrainSettings
from protocol import canary
from protocol.errors import ConfigInvalid

TOLERANCE_NATS = 1e-3
"""Two ways through the same float32 weights agree far better than this."""


def prepare(model: Any, settings: TrainSettings) -> None:
    """Have the model take packed samples, and make sure that it says of them what it says by itself."""
    model.set_attn_implementation(IMPLEMENTATION)
    if settings.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    text = torch.tensor(canary.text(model.config.get_text_config().vocab_size))
    half = len(text) // 2
    one = Tensors(
        prompts=(text[:half],),
        owners=torch.zeros(1, dtype=torch.long),
        tokens=text[None, half:],
        mask=torch.ones(1, len(text) - half),
        behaviour=torch.zeros(1, len(text) - half),
        rewards=torch.zeros(1),
        weights=torch.ones(1),
        taught=torch.ones(1, len(text) - half),
    )
    # The model's own method, where it has one, gathers weights that lie in shards.
    say = getattr(model, completion_logprobs.__name__, partial(completion_logprobs, model))
    with torch.no_grad():
        packed, _ = say(one, torch.tensor([0]), TrainSettings(learning_rate=0.0))
        logits = model(input_ids=text[None].to(model.device), use_cache=False).logits[0, half - 1 : -1]
        plain = logits.float().log_softmax(-1).gather(1, text[half:, None].to(model.device))[:, 0]
    if not torch.allclose(packed[0], plain, rtol=0.0, atol=TOLERANCE_NATS):
        raise ConfigInvalid(
            f"The learner cannot train a {model.config.model_type} model: packed, it computes something else.",
            hint="Qwen2, Qwen3, Llama and what is built like them can be trained.",
        )


def completion_logprobs(
    model: Any, data: Tensors, chosen: torch.Tensor, settings: TrainSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the chosen samples' tokens, and the entropy at each: [n, T'] each, 0 at padding."""
    packing = pack(data, chosen, model.device)
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    # A mask in four dimensions is taken as it is; attention has its own idea of who sees whom.
    nobody = torch.empty(1, 1, 1, 1, device=model.device)
    # Without autocast's cache, which would keep a bf16 copy of all weights for as long as a piece is computed.
    with torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16, cache_enabled=False):
        states = model.get_decoder()(
            input_ids=packing.tokens,
            position_ids=packing.positions,
            attention_mask=nobody,
            packing=packing,
            use_cache=False,
        ).last_hidden_state[0]  # [L, H]
        logprobs, entropy = selected_logprobs(
            states.index_select(0, packing.rows),
            model.get_output_embeddings().weight,
            packing.source,
            packing.targets,
            temperature=settings.temperature,
            dtype=dtype,
        )
    shape = (len(chosen), int(data.lengths[chosen].max()))
    places = (packing.places // shape[1], packing.places % shape[1])
    # Fresh tensors, no views: FSDP hangs its hooks on what a forward pass returns.
    table = logprobs.new_zeros(shape).index_put(places, logprobs)
    return table, torch.zeros_like(table).index_put(places, entropy[packing.source])
