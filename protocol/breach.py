"""A breach: what an error says beside its words of how a message is not as it must be.

- Whoever finds the fault fills in what is known there; what is left empty, `protocol.work.evidence` has by the error's
  code.
- With a failed request it travels in the error itself, as text; it comes from a stranger, so it is bounded when read.
"""

from typing import Any, NamedTuple

TEXT_MAX = 200
"""Signs of each text: a person reads it."""

POSITIONS_MAX = 8
"""Places shown, the first of them."""

Places = tuple[tuple[int, int], ...]


class Breach(NamedTuple):
    """Where it is, what should be there, and what is."""

    field: str = ""
    expected: str = ""
    observed: str = ""
    positions: Places = ()
    """Sample and token, each counted from 0."""
    tolerance: str = ""
    """How far off would have passed; empty: nothing else would."""

    def to_wire(self) -> dict[str, str]:
        texts = {"field": self.field, "expected": self.expected, "observed": self.observed}
        return {name: text[:TEXT_MAX] for name, text in texts.items() if text}

    @staticmethod
    def from_wire(fields: dict[Any, Any]) -> "Breach":
        field, expected, observed = (str(fields.get(name, ""))[:TEXT_MAX] for name in ("field", "expected", "observed"))
        return Breach(field, expected, observed)


def different(field: str, expected: object, observed: object) -> Breach:
    """One field that is not what it should be."""
    return Breach(field, str(expected), str(observed))


UNSAID = Breach()
