"""The embedded default policy: a tiny Qwen3 with a byte-level tokenizer, generated in hub format.

- `AutoModelForCausalLM` and `AutoTokenizer` load the folder like any published model.
- The weights are a function of the seed; the tokenizer is the same for every seed.
- Its tokenizer, and the length of its texts, are in `embedded_text`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from coordinator.learner.embedded_text import END, PAD, POSITIONS, positions_of, train_tokenizer


class EmbeddedShape(NamedTuple):
    """The dimensions of the model."""

    hidden: int
    layers: int
    heads: int
    intermediate: int


DEFAULT_SHAPE = EmbeddedShape(hidden=128, layers=4, heads=4, intermediate=512)
"""1.1 million parameters: of the shapes tried, a deep and narrow model learned sums in the least CPU time."""


def make_policy(folder: Path, *, seed: int, shape: EmbeddedShape = DEFAULT_SHAPE, words: Sequence[str] = ()) -> None:
    """Write an untrained policy in hub format; each of `words` becomes a token."""
    tokenizer = make_tokenizer(words)
    make_model(tokenizer, seed=seed, shape=shape, positions=positions_of(words)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: any text can be encoded, and digits never merge."""
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers annotates half
        tokenizer_object=train_tokenizer(words), eos_token=END, pad_token=PAD
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, shape: EmbeddedShape = DEFAULT_SHAPE, positions: int = POSITIONS
) -> Qwen3ForCausalLM:
    """Return a model with random weights; the global random state does not change."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=positions,
        # Prompts have a dozen tokens: a low base turns fast enough to distinguish neighbouring positions.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        # The usual 0.02 is for wide models; a narrow one leaves its plateau in half the steps with 1/sqrt(hidden).
        initializer_range=0.07,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
