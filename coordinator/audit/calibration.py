"""How far honest work strays from a replay: tolerances by class of node, from probe runs of honest nodes.

- A class is what a node computes with: engine, dtype, device. It has limits for margins and log-probability errors.
- A limit is `tolerance`, which a share `rate` of honest positions may pass, and `far`, which none may.
- Tolerances are measured and then widened by the factors below, since the next honest machine is not the probed one.
- `tolerances.json` beside this module ships with the classes that were probed here. A round may have a file of its own,
  made by `swarm-coordinator calibrate` and signed with the round's targets keys (DSSE, by securesystemslib).
"""

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as SigningError
from securesystemslib.signer import Signer
from tuf.api.metadata import Root

from coordinator.audit.replay import Floats, Measured, joined
from coordinator.files import read_at_most
from protocol.errors import AuditFailed
from protocol.limits import MIB

PAYLOAD_TYPE = "application/vnd.echo-swarm.tolerances+json"
FILE = "tolerances.json"
SHIPPED = Path(__file__).with_name(FILE)
ROLE = "targets"
"""The keys that vouch for policies vouch for how they are judged."""

FILE_MAX_BYTES = MIB
"""A class takes half a kilobyte."""

QUANTILE = 0.999
WIDER = 2.0
"""On measured tolerances, rates and group means."""
FARTHER = 4.0
"""On the largest value seen among the probes; ten times the tolerance is the least that is called far."""

FLOOR_NATS = 1e-3
"""The narrowest tolerance: engines of other makers differ by a thirtieth of this in float32."""

POSITIONS_MIN = 10_000
"""Fewer probed positions say nothing of one in a thousand."""

GROUP_CONTEXTS_MIN = 64
"""A mean over fewer is mostly chance."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Limit(_Model):
    """Of one quantity of a position, in nats."""

    tolerance: float = Field(gt=0)
    rate: float = Field(gt=0, lt=1)
    far: float = Field(gt=0)


class Tolerance(_Model):
    """One class of nodes."""

    name: str = Field(pattern=r"^[a-z0-9_.-]+/[a-z0-9_.-]+/[a-z0-9_.-]+$")
    """engine/dtype/device."""
    margin: Limit
    error: Limit
    mean_error: float = Field(gt=0)
    """Of the mean absolute error of one group, each context counted once."""
    positions: int
    """Probed."""


class Calibration(_Model):
    """A whole file."""

    version: int = Field(ge=1)
    made: date
    model: str
    """What the probes ran, in words."""
    classes: tuple[Tolerance, ...] = Field(min_length=1)

    def of(self, name: str) -> Tolerance:
        found = next((entry for entry in self.classes if entry.name == name), None)
        if found is None:
            known = ", ".join(entry.name for entry in self.classes)
            raise AuditFailed(f"No tolerances are known for {name}.", hint=f"There are: {known}.")
        return found

    def with_class(self, tolerance: Tolerance, *, made: date, model: str) -> "Calibration":
        """The next version, with one class added or measured anew."""
        others = tuple(entry for entry in self.classes if entry.name != tolerance.name)
        return Calibration(version=self.version + 1, made=made, model=model, classes=(*others, tolerance))


def derive(name: str, groups: Sequence[Measured]) -> Tolerance:
    """The tolerances of a class from groups of honest nodes of that class."""
    if (positions := sum(map(len, groups))) < POSITIONS_MIN:
        raise AuditFailed(
            f"{positions} honest positions are too few to calibrate on.", hint=f"Probe {POSITIONS_MIN} or more."
        )
    every = joined(groups)
    errors = np.abs(every.errors)
    by_context = [group.means(np.abs(group.errors)) for group in groups]
    means = [float(values.mean()) for values in by_context if len(values) >= GROUP_CONTEXTS_MIN]
    return Tolerance(
        name=name,
        margin=_limit(every.margins),
        error=_limit(errors),
        mean_error=max(FLOOR_NATS / 10, WIDER * max(means, default=float(errors.max()))),
        positions=positions,
    )


def _limit(values: Floats) -> Limit:
    tolerance = max(FLOOR_NATS, WIDER * float(np.quantile(values, QUANTILE)))
    # Three in n is the most that may hide behind none in n, at 95 %.
    rate = max(3 / len(values), WIDER * float((values > tolerance).mean()))
    return Limit(tolerance=tolerance, rate=rate, far=max(10 * tolerance, FARTHER * float(values.max())))


def load(folder: Path, root: Root) -> Calibration:
    """A round's own tolerances if it has any, signed by enough keys; else those that ship."""
    path = folder / FILE
    if not path.exists():
        return read(SHIPPED)
    role = root.roles[ROLE]
    keys = [root.keys[keyid] for keyid in role.keyids]
    data = _read(path)
    try:
        envelope = Envelope.from_dict(json.loads(data))
        envelope.verify(list(keys), role.threshold)
    except (SigningError, ValueError, KeyError, TypeError, AttributeError) as error:  # as JSON of any shape may raise
        raise AuditFailed(
            f"{path} is not signed by the round's {ROLE} keys: {error}", hint="Calibrate again."
        ) from None
    if envelope.payload_type != PAYLOAD_TYPE:
        raise AuditFailed(f"{path} holds {envelope.payload_type[:60]!r}, not tolerances.", hint="Calibrate again.")
    return _parse(envelope.payload, path)


def read(path: Path) -> Calibration:
    """A file that needs no signature, because it came with the code or was checked before it was copied."""
    return _parse(_read(path), path)


def sign(calibration: Calibration, signers: Sequence[Signer]) -> bytes:
    """The file of a round."""
    envelope = Envelope(calibration.model_dump_json().encode(), PAYLOAD_TYPE, {})
    for signer in signers:
        envelope.sign(signer)
    return json.dumps(envelope.to_dict(), indent=2).encode()


def _read(path: Path) -> bytes:
    try:
        return read_at_most(path, FILE_MAX_BYTES)
    except (OSError, ValueError) as error:
        raise AuditFailed(f"There are no tolerances: {error}.") from None


def _parse(data: bytes, path: Path) -> Calibration:
    try:
        return Calibration.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise AuditFailed(f"{path}: {first['loc']}: {first['msg']}.") from None
