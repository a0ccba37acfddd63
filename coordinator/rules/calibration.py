"""Calibration: how far honest work may differ from a replay, by class of node, measured in runs of honest nodes.

- A class is what a node computes with: engine, dtype, device. It has limits for margins and log-probability errors.
- A limit is `tolerance`, which a share `rate` of honest positions may pass, and `far`, which none may.
- Tolerances are measured and then widened by the factors below, since other honest machines differ from the probed one.
- Tolerances belong to a class and a policy: those that were measured on another policy cause no fault. A claim that
  fails only by them is held until its class is calibrated on this policy.
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

from coordinator.base.files import read_at_most, write_durably
from coordinator.rules.replay import Floats, ReplayMeasurement, joined
from protocol.errors import AuditFailed
from protocol.limits import MIB

PAYLOAD_TYPE = "application/vnd.echo-swarm.tolerances+json"
FILE = "tolerances.json"
SHIPPED = Path(__file__).with_name(FILE)
ROLE = "targets"
"""The role whose keys sign tolerances: the same keys sign policies."""

FILE_MAX_BYTES = MIB
"""The largest file of tolerances; a class takes half a kilobyte."""

QUANTILE = 0.999
WIDER = 2.0
"""Factor on measured tolerances and group means."""
RATE_WIDER = 10.0
"""Factor on measured rates: another card of the class may pass a tolerance five times as often as the probed one."""
FARTHER = 4.0
"""Factor on the largest value seen among the probes; `far` is at least ten times the tolerance."""

FLOOR_NATS = 1e-3
"""The narrowest tolerance: engines of other makers differ by a thirtieth of this in float32."""

DICTATED_MIN = 0.5
"""The least share of tokens that are the dictated ones: rounding leaves more, 70 % in bf16 on SmolLM2."""

EXACT = "torch/fp32/cpu"
"""The class whose tolerances are the floor above, on every policy: on SmolLM2 its mean error is 2e-6 nats. Other
engines were compared in float32 only on the model of the shipped numbers."""

UNNAMED = "unnamed/fp32/unnamed"
"""The class of a node that does not report its class."""

POSITIONS_MIN = 5_000
"""The fewest probed positions: five of them are beyond the quantile. Fewer cannot show one in a thousand."""

GROUP_CONTEXTS_MIN = 64
"""The fewest contexts for a mean: over fewer it is mostly chance."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Limit(_Model):
    """The limits of one quantity of a position, in nats."""

    tolerance: float = Field(gt=0)
    rate: float = Field(gt=0, lt=1)
    far: float = Field(gt=0)


class Tolerance(_Model):
    """The tolerances of one class of nodes."""

    name: str = Field(pattern=r"^[a-z0-9_.-]+/[a-z0-9_.-]+/[a-z0-9_.-]+$")
    """engine/dtype/device."""
    margin: Limit
    error: Limit
    mean_error: float = Field(gt=0)
    """The limit of the mean absolute error of one group, each context counted once."""
    positions: int
    """The number of probed positions."""
    round_id: str = Field("", max_length=64)
    """The round whose policy was probed; empty: the numbers are of another model."""
    first: tuple[float, ...] | None = Field(None, min_length=7, max_length=7)
    """The `limits` of the round's first calibration, which bound those of renewals; None if made by hand."""

    @property
    def limits(self) -> tuple[float, ...]:
        """Return every number that a claim is judged by."""
        margin, error = (tuple(limit.model_dump().values()) for limit in (self.margin, self.error))
        return (*margin, *error, self.mean_error)

    @property
    def precision(self) -> str:
        return self.name.split("/")[1]

    def is_measured_on(self, round_id: str) -> bool:
        """Return True if these numbers hold for the policy of this round."""
        return self.round_id == round_id or (not self.round_id and self.name == EXACT)


class Calibration(_Model):
    """The content of a file of tolerances."""

    version: int = Field(ge=1)
    made: date
    model: str
    """A description of the model that the probes ran."""
    classes: tuple[Tolerance, ...] = Field(min_length=1)

    def tolerances_of(self, name: str) -> Tolerance:
        """Return the tolerances of a class that is known."""
        known_class = next((entry for entry in self.classes if entry.name == name), None)
        if known_class is None:
            known = ", ".join(entry.name for entry in self.classes)
            raise AuditFailed(f"No tolerances are known for {name}.", hint=f"There are: {known}.")
        return known_class

    def judging(self, name: str, round_id: str) -> tuple[Tolerance, bool]:
        """Return the tolerances that a class is judged by, and whether they were measured on this round's policy.

        A class without numbers of this policy is judged by those of its precision that have some, else by its own of
        another policy, else by one of its precision, if possible of its engine, else by torch's float32.
        """
        name = name or UNNAMED
        own = next((entry for entry in self.classes if entry.name == name), None)
        if own is not None and own.is_measured_on(round_id):
            return own, True
        if name.count("/") != 2:
            raise AuditFailed(f"{name[:100]!r} is no class of nodes.", hint="A class is engine/dtype/device.")
        engine, precision, _ = name.split("/")
        others = sorted(
            self.classes,
            key=lambda entry: (entry.round_id != round_id, entry.name != name, entry.name.split("/")[0] != engine),
        )
        alike = [entry for entry in others if entry.precision == precision]
        alike += [entry for entry in others if entry.name == EXACT]
        nearest = (alike or others)[0]
        return (nearest if nearest is own else nearest.model_copy(update={"name": name, "round_id": ""})), False

    def has_precision(self, precision: str, round_id: str) -> bool:
        """Return True if a class of this precision was measured on this round's policy."""
        return any(entry.precision == precision and entry.round_id == round_id for entry in self.classes)

    def measured_on(self, round_id: str) -> tuple[str, ...]:
        """Return the names of the classes that have numbers of this round's policy."""
        return tuple(entry.name for entry in self.classes if entry.is_measured_on(round_id))

    def with_class(self, tolerance: Tolerance, *, made: date, model: str) -> "Calibration":
        """Return the next version, with one class added or replaced."""
        others = tuple(entry for entry in self.classes if entry.name != tolerance.name)
        return Calibration(version=self.version + 1, made=made, model=model, classes=(*others, tolerance))


def derive(name: str, groups: Sequence[ReplayMeasurement], round_id: str = "") -> Tolerance:
    """Return the tolerances of a class on a round's policy, from groups of honest nodes of that class."""
    if (positions := sum(map(len, groups))) < POSITIONS_MIN:
        raise AuditFailed(
            f"{positions} honest positions are too few to calibrate on.", hint=f"Probe {POSITIONS_MIN} or more."
        )
    every = joined(groups)
    if (share := float((every.claimed == every.dictated).mean())) < DICTATED_MIN:
        raise AuditFailed(
            f"Only {share:.0%} of the tokens are those that version and seed dictate: rounding does not explain that.",
            hint="Check that this node computes with the right weights.",
        )
    errors = np.abs(every.errors)
    by_context = [group.means(np.abs(group.errors)) for group in groups]
    means = [float(values.mean()) for values in by_context if len(values) >= GROUP_CONTEXTS_MIN]
    return Tolerance(
        name=name,
        margin=_limit(every.margins),
        error=_limit(errors),
        mean_error=max(FLOOR_NATS / 10, WIDER * max(means, default=float(errors.max()))),
        positions=positions,
        round_id=round_id,
    )


def _limit(values: Floats) -> Limit:
    tolerance = max(FLOOR_NATS, WIDER * float(np.quantile(values, QUANTILE)))
    # If none of n was seen, the true rate is at most 3 in n, at 95 %.
    rate = max(3 / len(values), RATE_WIDER * float((values > tolerance).mean()))
    return Limit(tolerance=tolerance, rate=rate, far=max(10 * tolerance, FARTHER * float(values.max())))


def load(folder: Path, root: Root) -> Calibration:
    """Return a round's own tolerances if it has any, signed by enough keys; else the shipped ones."""
    path = folder / FILE
    if not path.exists():
        return read(SHIPPED)
    role = root.roles[ROLE]
    keys = [root.keys[keyid] for keyid in role.keyids]
    data = _read(path)
    try:
        envelope = Envelope.from_dict(json.loads(data))
        envelope.verify(list(keys), role.threshold)
    except (
        SigningError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # JSON of any shape may raise these
        raise AuditFailed(
            f"{path} is not signed by the round's {ROLE} keys: {error}", hint="Calibrate again."
        ) from None
    if envelope.payload_type != PAYLOAD_TYPE:
        raise AuditFailed(f"{path} holds {envelope.payload_type[:60]!r}, not tolerances.", hint="Calibrate again.")
    return _parse(envelope.payload, path)


def read(path: Path) -> Calibration:
    """Read a file that needs no signature: it came with the code, or was checked before it was copied."""
    return _parse(_read(path), path)


def sign(calibration: Calibration, signers: Sequence[Signer]) -> bytes:
    """Return the bytes of a round's file of tolerances, signed by `signers`."""
    envelope = Envelope(calibration.model_dump_json().encode(), PAYLOAD_TYPE, {})
    for signer in signers:
        envelope.sign(signer)
    return json.dumps(envelope.to_dict(), indent=2).encode()


def save(folder: Path, made: Calibration, signers: Sequence[Signer]) -> None:
    """Replace the tolerances of a round."""
    write_durably(folder / FILE, sign(made, signers))


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
