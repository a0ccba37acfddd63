"""A breach: the field of a message that breaks a rule, with its expected and its observed value.

- The check that fails fills in what it knows; `protocol.work.evidence` fills the empty fields by the error's code.
- A failed request carries it in the error itself, as text. An untrusted sender wrote it, so it is cut when it is read.
"""

from typing import Any, NamedTuple

TEXT_MAX = 200
"""Characters of each text: a person reads it."""

POSITIONS_MAX = 8
"""Places that are reported: the first ones."""

Places = tuple[tuple[int, int], ...]


class Breach(NamedTuple):
    """A field that breaks a rule: its name, the expected value and the observed value."""

    field: str = ""
    expected: str = ""
    observed: str = ""
    positions: Places = ()
    """Sample and token, each counted from 0."""
    tolerance: str = ""
    """The largest difference that would have passed; empty if only the expected value would."""

    def to_wire(self) -> dict[str, str]:
        texts = {"field": self.field, "expected": self.expected, "observed": self.observed}
        return {name: text[:TEXT_MAX] for name, text in texts.items() if text}

    @staticmethod
    def from_wire(fields: dict[Any, Any]) -> "Breach":
        field, expected, observed = (str(fields.get(name, ""))[:TEXT_MAX] for name in ("field", "expected", "observed"))
        return Breach(field, expected, observed)


def different(field: str, expected: object, observed: object) -> Breach:
    """Return the breach of a field whose value differs from the expected one."""
    return Breach(field, str(expected), str(observed))


UNSAID = Breach()
