"""Samples of a reply, which may be sent while they grow, and the text of each: what can be sent, and where it ends.

    push(first tokens) ──▶ part     any number; a part may have no text yet
    finish(all tokens) ──▶ the rest, with the finish and the receipt

- Tokens come with the place of the first one, since a node that takes over from a lost one may begin anew. What was
  pushed before must come again; else the sample differs, and no more of it is sent.
- The finished sample is the one that was accepted and is audited. If it differs from what was sent, `finish` raises
  `AnswerChanged`: the caller has read tokens that nobody vouches for.
- No text is sent that a later token changes: half of a UTF-8 character decodes to U+FFFD and is held back.
- No text is sent that may be the begin of a stop string. The text ends before the stop string that is complete first;
  if several are complete with the same character, before the longest.
- Only a window of the last tokens is decoded, so that the time is linear in the number of tokens. With a byte-level
  vocabulary, the texts that are returned are together exactly the text of all tokens. A vocabulary that falls back to
  single bytes decodes a run of them as one: after `HELD_MAX_CHARS` of them without a valid text, U+FFFD is sent.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from coordinator.endpoint.replies import SampleReply
from protocol.errors import AnswerChanged

Decode = Callable[[Sequence[int]], str]
"""The text of tokens, as `PolicyCodec.decode` returns it."""

UNREADABLE = "\ufffd"
"""The decoded text of bytes that are no UTF-8, or not yet."""

HELD_MAX_CHARS = 32
"""U+FFFD at the end that are held back: bytes of eight emoji. A sample of nothing else is not held back for ever."""

PIECE_TOKENS = 32
"""Tokens that are decoded at once."""

WINDOW_TOKENS = 32
"""Tokens in the window, after which its first ones are dropped."""

KEPT_TOKENS = (8, 12, 16)
"""Numbers of tokens to keep. After eight, a character that began before them has ended."""

WINDOW_MAX_TOKENS, KEPT_AT_MOST_TOKENS = 256, 128
"""Bounds of a window in which no good place to cut is found: 128 tokens have more than `HELD_MAX_CHARS` characters."""


class DecodeWindow:
    """A decoder of a growing sequence of tokens that decodes only the last of them."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._returned_chars = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the new text that no later token changes."""
        self._tokens += tokens
        text = self._decode(self._tokens)
        certain_chars = max(len(text.rstrip(UNREADABLE)), len(text) - HELD_MAX_CHARS)
        new = text[self._returned_chars : certain_chars]
        self._returned_chars = max(self._returned_chars, certain_chars)
        if len(self._tokens) > WINDOW_TOKENS:
            self._drop_first(text)
        return new

    def flush(self) -> str:
        """Return the text that is still held back, as no token follows."""
        text = self._decode(self._tokens)
        new, self._returned_chars = text[self._returned_chars :], len(text)
        return new

    def copy(self) -> "DecodeWindow":
        """Return an independent decoder in the same state."""
        made = DecodeWindow(self._decode)
        made._tokens, made._returned_chars = list(self._tokens), self._returned_chars
        return made

    def _drop_first(self, text: str) -> None:
        """Drop the first tokens of the window whose text is `text`.

        The texts of the old and the new window are the same from their ends back, so the text that is still held back
        has the same length in both.
        """
        held_chars = len(text) - self._returned_chars
        for kept in KEPT_TOKENS if not held_chars else ():
            if text.endswith(rest := self._decode(self._tokens[-kept:])):
                self._tokens, self._returned_chars = self._tokens[-kept:], len(rest)
                return
        if len(self._tokens) > WINDOW_MAX_TOKENS:
            self._tokens = self._tokens[-KEPT_AT_MOST_TOKENS:]
            self._returned_chars = max(0, len(self._decode(self._tokens)) - held_chars)


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """The end of a sample: its number of tokens, and the reason."""

    tokens: int
    """The tokens up to and including the end token, or the token that completed a stop string."""
    finish: Literal["stop", "length"]


class TextStream:
    """The text of one sample, which is returned as soon as it is certain."""

    def __init__(self, decode: Decode, stops: Sequence[str] = (), end_tokens: Collection[int] = ()) -> None:
        self._window = DecodeWindow(decode)
        self._stops, self._end_tokens = tuple(stops), frozenset(end_tokens)
        self._held = ""
        self._tokens = 0
        self.end: SampleEnd | None = None
        """The end of the sample, once it is known; tokens after it are ignored."""

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens of the sample; return the new text that is safe to send."""
        new = []
        for start in range(0, len(tokens), PIECE_TOKENS):
            if self.end:
                break
            new.append(self._piece(tokens[start : start + PIECE_TOKENS]))
        return "".join(new)

    def finish(self) -> str:
        """Return the rest of the text: no token follows. A sample without an end has reached its length."""
        if self.end:
            return ""
        text, stop_end = self._without_stop(self._window.flush())
        if stop_end:
            self.end = SampleEnd(self._tokens, "stop")
            return text
        self.end = SampleEnd(self._tokens, "length")
        return text + self._released()

    def _piece(self, tokens: Sequence[int]) -> str:
        count = next((place for place, token in enumerate(tokens) if token in self._end_tokens), len(tokens))
        ended, tokens = count < len(tokens), tokens[:count]
        before = self._window.copy() if self._stops else self._window
        text = self._window.push(tokens) + (self._window.flush() if ended else "")
        text, stop_end = self._without_stop(text)
        if stop_end:
            more = bisect_left(range(count), stop_end, key=lambda size: len(before.copy().push(tokens[:size])))
            self.end = SampleEnd(self._tokens + more, "stop")
            return text
        self._tokens += count
        if ended:
            self.end = SampleEnd(self._tokens + 1, "stop")
            text += self._released()
        return text

    def _without_stop(self, new: str) -> tuple[str, int]:
        """Return the text to send, and the characters of `new` up to the end of a stop string; 0 if there is none."""
        text, held_chars = self._held + new, len(self._held)
        places = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            end, start = min(places)
            self._held = ""
            return text[:start], end - held_chars
        start = min((_start_of_prefix(text, stop) for stop in self._stops), default=len(text))
        self._held = text[start:]
        return text[:start], 0

    def _released(self) -> str:
        text, self._held = self._held, ""
        return text


def _start_of_prefix(text: str, stop: str) -> int:
    """Return where the longest end of the text begins that `stop` begins with, too."""
    place = max(0, len(text) - len(stop) + 1)
    while (place := text.find(stop[0], place)) >= 0:
        if stop.startswith(text[place:]):
            return place
        place += 1
    return len(text)


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
