"""The text of the embedded policy: its tokenizer, and how long a text may be; made without torch.

- Digits are single tokens, as in Qwen's own tokenizer, whose splitting rule is copied.
- In a round of games, the words of the game are single tokens, too, and the model takes longer texts.
"""

import json
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

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


def train_tokenizer(words: Sequence[str] = ()) -> Tokenizer:
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
    return tokenizer


def positions_of(words: Sequence[str]) -> int:
    """Return the tokens of the longest text of a policy with these words."""
    return GAME_POSITIONS if words else POSITIONS


def text_files(words: Sequence[str] = ()) -> dict[str, bytes]:
    """Return the files that say how a text is encoded, and how long it may be."""
    tokenizer = train_tokenizer(words)
    shape = {"max_position_embeddings": positions_of(words), "eos_token_id": tokenizer.token_to_id(END)}
    return {"tokenizer.json": tokenizer.to_str().encode(), "config.json": json.dumps(shape).encode()}
