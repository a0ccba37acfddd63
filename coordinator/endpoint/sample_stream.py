"""Samples of a reply, which may be sent while they grow.

    push(first tokens) ──▶ part     any number; a part may have no text yet
    finish(all tokens) ──▶ the rest, with the finish and the receipt

- Tokens come with the place of the first one, since a node that takes over from a lost one may begin anew. What was
  pushed before must come again; else the sample differs, and no more of it is sent.
- The finished sample is the one that was accepted and is audited. If it differs from what was sent, `finish` raises
  `AnswerChanged`: the caller has read tokens that nobody vouches for.
"""

from collections.abc import Collection, Sequence

from coordinator.endpoint.replies import SampleReply
from coordinator.endpoint.text_stream import Decode, DecodeWindow, TextStream
from protocol.errors import AnswerChanged


class SampleStream:
    """One sample of a reply."""

    def __init__(
        self, decode: Decode, stops: Sequence[str], end_tokens: Collection[int], *, with_texts: bool = False
    ) -> None:
        self._text = TextStream(decode, stops, end_tokens)
        self._window = DecodeWindow(decode) if with_texts else None
        """The decoder of the text that each token adds; None if the reply has no log-probabilities."""
        self._window_chars = 0
        self._tokens: list[int] = []
        self._is_different = False
        self.sent_tokens = 0
        """The tokens in all parts; those after the end of the text are in none."""

    def push(self, start: int, tokens: Sequence[int], logprobs: Sequence[float]) -> SampleReply | None:
        """Return the part with these tokens, the first of which is number `start`; None if nothing new came."""
        known = len(self._tokens) - start
        if known < 0 or self._is_different or self._text.end:
            return None
        if list(tokens[:known]) != self._tokens[start : start + len(tokens)]:
            self._is_different = True
            return None
        return self._part(tokens[known:], logprobs[known:]) if len(tokens) > known else None

    def finish(self, tokens: Sequence[int], logprobs: Sequence[float], receipt: str) -> SampleReply:
        """Return the last part of the sample that has these tokens."""
        known = len(self._tokens)
        if self._is_different or list(tokens[:known]) != self._tokens:
            said = "The node that sampled this answer was lost, and another one sampled it differently."
            raise AnswerChanged(said, hint="Discard what came of it, and repeat the request.")
        return self._part(tokens[known:], logprobs[known:], receipt=receipt, is_last=True)

    def _part(
        self, tokens: Sequence[int], logprobs: Sequence[float], *, receipt: str = "", is_last: bool = False
    ) -> SampleReply:
        self._tokens += tokens
        text = self._text.push(tokens) + (self._text.finish() if is_last else "")
        end = self._text.end
        count = end.tokens - self.sent_tokens if end else len(tokens)
        self.sent_tokens += count
        before_chars, texts = self._window_chars, self._texts(tokens[:count], is_last=is_last)
        return SampleReply(
            tokens=list(tokens[:count]),
            logprobs=list(logprobs[:count]),
            text=text,
            finish=end.finish if end and is_last else None,
            receipt=receipt,
            token_texts=texts,
            offset_chars=before_chars,
        )

    def _texts(self, tokens: Sequence[int], *, is_last: bool) -> list[str]:
        """Return the text that each token adds; what no token follows belongs to the last one."""
        if self._window is None:
            return []
        texts = [self._window.push([token]) for token in tokens]
        if is_last and texts:
            texts[-1] += self._window.flush()
        self._window_chars += sum(map(len, texts))
        return texts
