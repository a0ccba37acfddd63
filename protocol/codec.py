"""A policy's own tokenizer: text and tokens, the same on both sides of the wire.

- No special token is added to a text; one that the text spells out is one token.
- Special tokens stay visible in what is decoded: one inside an answer makes it wrong, it does not vanish.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer


class PolicyCodec:
    """The tokenizer of one policy folder, from what its tokenizer.json says."""

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)
