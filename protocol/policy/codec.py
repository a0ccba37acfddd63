"""A policy's own tokenizer: text to tokens and back, the same on both sides of the wire.

- No special token is added to a text; a special token written in the text is encoded as that token.
- Every token stays visible in the decoded text: a special token inside an answer makes it wrong and does not vanish.
  The same holds for tokens without a text, which many policies have beyond the last token of their tokenizer.
"""

from collections.abc import Sequence
from itertools import groupby

from tokenizers import Tokenizer

WORDLESS = "\ufffd"
"""The replacement for a token that has no text."""


class PolicyCodec:
    """The tokenizer of one policy folder, built from its tokenizer.json."""

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        if all(map(self._has_text, tokens)):
            return self._text(tokens)
        runs = ((has_text, list(run)) for has_text, run in groupby(tokens, self._has_text))
        return "".join(self._text(run) if has_text else WORDLESS * len(run) for has_text, run in runs)

    def _has_text(self, token: int) -> bool:
        return self._tokenizer.id_to_token(token) is not None

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)
