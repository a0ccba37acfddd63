"""The embedded default policy: a tiny Qwen3 with a byte-level tokenizer, made on the spot in hub format.

- Everything is real: `AutoModelForCausalLM` and `AutoTokenizer` load the folder as they would any published model.
- The weights are a function of the seed; the tokenizer is the same for every seed.
- Digits are single tokens, as in Qwen's own tokenizer, whose splitting rule this one copies.
- For a round of games, the game's own words are single tokens besides, and a model has room for longer texts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 320
"""256 bytes, three special tokens and a few merges; small, because every token of it costs a column of logits."""

POSITIONS, GAME_POSITIONS = 512, 2048
"""Tokens of the longest text, and of the longest game."""

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = (
    "Add the two numbers. What is the sum of these numbers? The answer is a number, and nothing else stands after it.",
    "A volunteer swarm trains one model: the nodes sample, the learner learns, and the ledger says who is owed what.",
)


class EmbeddedShape(NamedTuple):
    """How large the model is."""

    hidden: int
    layers: int
    heads: int
    intermediate: int


DEFAULT_SHAPE = EmbeddedShape(hidden=128, layers=4, heads=4, intermediate=512)
"""1.1 million parameters: deep and narrow learned sums in the least CPU time of the shapes tried."""


def make_policy(folder: Path, *, seed: int, shape: EmbeddedShape = DEFAULT_SHAPE, words: Sequence[str] = ()) -> None:
    """Write an untrained policy in hub format; these words are to be tokens of their own."""
    tokenizer = make_tokenizer(words)
    make_model(tokenizer, seed=seed, shape=shape, positions=GAME_POSITIONS if words else POSITIONS).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)


def make_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text has tokens, and digits never merge."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True) for text in (PAD, START, END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers annotates half
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, shape: EmbeddedShape = DEFAULT_SHAPE, positions: int = POSITIONS
) -> Qwen3ForCausalLM:
    """A model with random weights; leaves the global random state as it was."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=positions,
        # Prompts of a dozen tokens: a low base turns fast enough to tell neighbouring places apart.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        # The usual 0.02 suits wide models; a narrow one leaves its plateau in half the steps with 1/sqrt(hidden).
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
