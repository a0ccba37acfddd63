"""The catalogue of cheats: each gives completions, and says which of them it touched, by default all.

The log-probabilities are those of what was drawn from; where that is nothing, they are left to the disguise (`cells`).
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.verification.cells import Mask, Said, generate, load
from bench.verification.model import Text
from bench.verification.sampler import Group
from protocol.work.rollout import Completion

Made = tuple[str, Said, Mask | None]

ELSEWHERE = 2**32
"""Added to a seed: what was drawn for somebody else."""


@dataclass(frozen=True)
class Cheater:
    """A node that cheats: it has the claimed policy, a cheaper one, and leases to answer."""

    claimed: Path
    small: Path
    groups: Sequence[Group]
    text: Text

    def others(self) -> Iterator[Made]:
        """Tokens of other weights, or of the right ones otherwise drawn."""
        yield "small model", self._from(load(self.small)), None
        model = load(self.claimed)
        yield "8-bit weights", self._from(quantised(model, 8)), None
        yield "4-bit weights", self._from(quantised(model, 4)), None
        yield "temperature 0.8", self._from(model, temperature=0.8), None
        yield "top-p 0.9", self._from(model, top_p=0.9), None

    def choosers(self, honest: Said) -> Iterator[Made]:
        """The right model and sampler; what is drawn is not what is sent."""
        model = load(self.claimed)
        best, touched = honest, [[False] * len(said) for said in honest]
        for attempt in range(1, 8):
            again = generate(model, self._elsewhere(attempt), self.text)
            best, touched = self._better(best, touched, again)
            if attempt in (1, 3, 7):
                yield f"best of {attempt + 1}", best, touched
            if attempt == 1:
                yield "copied from a peer", again, None

    def editors(self, honest: Said) -> Iterator[Made]:
        """Honest completions, changed by hand."""
        other = [said[::-1] for said in honest[1:] + honest[:1]]
        for name, change in (("one token edited", self._edited), ("truncated", self._cut), ("padded", self._padded)):
            changed = [
                tuple(change(*pair) for pair in zip(mine, theirs, strict=True))
                for mine, theirs in zip(honest, other, strict=True)
            ]
            edited = [(first, *said[1:]) for (first, *_), said in zip(changed, honest, strict=True)]
            touched = [
                [new.tokens.tobytes() != old.tokens.tobytes() for new, old in zip(said, before, strict=True)]
                for said, before in zip(edited, honest, strict=True)
            ]
            yield f"{name}, 1 rollout in 16", edited, touched

    def _from(self, model: Any, **how: float) -> Said:
        return generate(model, self.groups, self.text, **how)

    def _elsewhere(self, attempt: int) -> list[Group]:
        return [replace(group, seed=group.seed + attempt * ELSEWHERE) for group in self.groups]

    def _better(self, best: Said, touched: Mask, again: Said) -> tuple[Said, Mask]:
        """Whichever of two attempts earns more, sample by sample."""
        swap = [
            [
                self.text.reward(group.number, new) > self.text.reward(group.number, old)
                for new, old in zip(news, olds, strict=True)
            ]
            for group, news, olds in zip(self.groups, again, best, strict=True)
        ]
        rows = zip(swap, again, best, strict=True)
        better = [tuple(n if s else o for s, n, o in zip(*row, strict=True)) for row in rows]
        return better, [[a or b for a, b in zip(*row, strict=True)] for row in zip(touched, swap, strict=True)]

    def _edited(self, mine: Completion, _other: Completion) -> Completion:
        """Another digit in the first answer, where a reward is decided."""
        tokens, digits = mine.tokens.copy(), self.text.encode("0123456789")
        tokens[1] = digits[(digits.index(int(tokens[1])) + 1) % 10] if int(tokens[1]) in digits else digits[0]
        return replace(mine, tokens=tokens)

    def _cut(self, mine: Completion, _other: Completion) -> Completion:
        """An end where the text would go on."""
        tokens = mine.tokens[: max(2, len(mine.tokens) // 2)].copy()
        tokens[-1] = self.text.end
        return Completion(tokens, mine.logprobs[: len(tokens)], "stop")

    def _padded(self, mine: Completion, other: Completion) -> Completion:
        """More text where the end was due: paid by the token."""
        if mine.finish == "length":
            return mine
        limit = self.text.bounds.max_new_tokens
        tokens = np.concatenate([mine.tokens[:-1], self.text.encode("\n"), other.tokens]).astype(np.uint32)[:limit]
        stopped = int(tokens[-1]) == self.text.end
        if not stopped and len(tokens) < limit:
            return mine
        return Completion(tokens, np.zeros(len(tokens), np.float32), "stop" if stopped else "length")


def quantised(model: Any, bits: int) -> Any:
    """A model whose matrices are rounded to so many bits, with a scale for each row, as small GPUs run them."""
    model, steps = copy.deepcopy(model), 2 ** (bits - 1) - 1
    with torch.no_grad():
        for matrix in (parameter for parameter in model.parameters() if parameter.ndim == 2):
            scale = (matrix.abs().amax(1, keepdim=True) / steps).clamp_min(torch.finfo(matrix.dtype).tiny)
            matrix.copy_((matrix / scale).round().clamp(-steps, steps) * scale)
    return model
