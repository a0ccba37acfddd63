"""Small vocabularies whose tokens split characters: byte pairs, and pieces that fall back to single bytes."""

from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from coordinator.endpoint.sample_stream import Decode, DecodeWindow
from protocol.policy.codec import PolicyCodec

TEXT = "Hello, world! 你好，世界 🙂🙃 👨‍👩‍👧 naïve café — the end of the end. STOP stop </s> \n\n"

END = 0
"""The end token of the byte pairs."""


@cache
def byte_pairs() -> PolicyCodec:
    """Return byte pairs learned from a text with emoji and Chinese: some tokens end in the middle of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT * 4, "你世 🙃🙂 界好"], trainer)
    return PolicyCodec(tokenizer.to_str())


@cache
def pieces() -> PolicyCodec:
    """Return a vocabulary as Llama 2 has it: words with a mark for the space before them, and all single bytes."""
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "▁end",
        "▁of",
        "▁Hello",
        "end",
        ",",
        ".",
    ]
    tokenizer = Tokenizer(
        models.BPE({word: number for number, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PolicyCodec(tokenizer.to_str())


def as_pieces(text: str) -> list[int]:
    """Return a text in the pieces: words that are in the vocabulary, and the bytes of all other characters."""
    ids = {"▁the": 258, "▁end": 259, "▁of": 260, "▁Hello": 261, "▁": 257}
    tokens = []
    for word in text.split(" "):
        if f"▁{word}" in ids:
            tokens.append(ids[f"▁{word}"])
        else:
            tokens += [ids["▁"], *(1 + byte for byte in word.encode())]
    return tokens


def token_texts(decode: Decode, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds: together, they are the text of all tokens.

    The bytes of one character may be in several tokens: the last of them adds the character, the others add nothing.
    """
    window = DecodeWindow(decode)
    texts = [window.push([token]) for token in tokens]
    if texts:
        texts[-1] += window.flush()
    return texts
