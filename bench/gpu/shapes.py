"""Models of which only the shape matters: random weights, and how much arithmetic a training step on them is.

- Counted is what the mathematics needs, not what is computed: a product of m × k by k × n is 2mkn, the backward pass
  twice the forward one. Recomputing layers, gathering weights and the optimizer are overhead.
- Each prompt counts once, however many samples it has: computing it for each of them would be overhead as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from coordinator.learner.embedded import make_tokenizer

FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class LearnerShape:
    """A Qwen3 with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int
    vocabulary: int

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of one layer: queries and output, keys and values, and the three of the gated unit."""
        attention = 2 * self.hidden * self.head * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    def step_flops(self, prompt_tokens: int, completions: Sequence[int]) -> int:
        """Return the FLOPs of a training step on one group: a prompt and its samples."""
        forward = 2 * (prompt_tokens + sum(completions)) * self.layers * self.layer_parameters
        forward += 2 * sum(completions) * self.vocabulary * self.hidden
        # Scores and sums over values: each token with those before it.
        pairs = prompt_tokens**2 // 2 + sum(prompt_tokens * length + length**2 // 2 for length in completions)
        forward += 4 * pairs * self.layers * self.heads * self.head
        return FORWARD_AND_BACKWARD * forward


SHAPES = {
    "Qwen3-0.6B": LearnerShape(1024, 28, 16, 8, 128, 3072, 151_936),
    "Qwen3-4B": LearnerShape(2560, 36, 32, 8, 128, 9728, 151_936),
}

TINY = LearnerShape(64, 2, 4, 2, 16, 192, 320)
"""The shape for a look at whether all this works, on any machine."""


def configuration(shape: LearnerShape) -> Qwen3Config:
    """Return the configuration of the model, in bfloat16 as such models come."""
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        intermediate_size=shape.intermediate,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )


def write(shape: LearnerShape, folder: Path, device: str) -> None:
    """Write a folder in hub format; the device draws the weights, since a CPU needs minutes for billions."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            Qwen3ForCausalLM(configuration(shape)).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
    make_tokenizer().save_pretrained(folder)
