"""The embedded default policy: a tiny Qwen3 with a byte-level tokenizer, generated in hub format.

- `AutoModelForCausalLM` and `AutoTokenizer` load the folder like any published model.
- The weights are a function of the seed; the tokenizer is the same for every seed.
- Digits are single tokens, as in Qwen's own tokenizer, whose splitting rule is copied.
- In a round of games, the words of the game are single tokens, too, and the model takes longer texts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 320
"""256 bytes, three special tokens and a few merges; small, because every token costs a column of logits."""

POSITIONS, GAME_POSITIONS = 512, 2048
"""The tokens of the longest text, and of the longest game."""

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
    make_model(tokenizer, seed=seed, shape=shape, positions=GAME_POSITIONS if words else POSITIONS).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)


def make_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: any text can be encoded, and digits never merge."""
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
