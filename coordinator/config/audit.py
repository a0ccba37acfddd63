"""Settings of audits and of the ledger: how much is audited, how it is judged, and which witnesses sign."""

from functools import cached_property
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from coordinator.config.section import Section
from ledger.note import KeyKind, NoteKey
from ledger.witness import WITNESSES_MAX
from protocol import limits
from protocol.errors import CheckpointInvalid


class AuditSection(Section):
    """How much is audited, and how it is judged."""

    tolerance: str = Field(
        "", description="class that everybody is judged by, where classes names none; empty: each by its own"
    )
    classes: tuple[str, ...] = Field(
        (),
        max_length=limits.CLASSES_MAX,
        description="engine/dtype/device that nodes may compute with; each is judged as such",
    )
    probes: tuple[str, ...] = Field(
        (),
        max_length=limits.PROBES_MAX,
        description="ids of your own nodes, on which classes are calibrated; fleet.local_nodes are as well",
    )
    neighbours: int = Field(
        3,
        ge=0,
        le=16,
        description="compare a claim with the version before; what fails softly with so many: 1, 2, 4, … before",
    )
    first_groups: int = Field(
        10,
        ge=0,
        description="the first groups of an owner that are all audited; after N groups the share is this number / N",
    )
    floor: float = Field(0.05, ge=0, le=1, description="share that is always audited; 0 with first_groups = 0: none")
    trusted_groups: int = Field(1000, ge=1, description="validated groups until trusted_floor holds")
    trusted_floor: float = Field(0.02, ge=0, le=1, description="share that is audited of a long-standing owner")
    escrow_factor: float = Field(1.25, ge=0, description="unaudited groups kept unpaid, times (1 - rate) / rate")
    epoch_groups: int = Field(256, ge=1, description="claims that one secret draws from before it is revealed")
    timeout_s: float = Field(
        120.0,
        gt=0,
        description="a replay in which nothing moves for so long ends, and its cases go to another auditor",
    )
    device: str = Field(
        "cpu",
        pattern=r"^(cpu|cuda(:\d+)?)$",
        description="cpu, cuda or cuda:N that auditors replay on; the learner and nodes have a GPU to themselves",
    )
    dtype: str = Field("float32", description="precision of the replay; no other is proven to judge as strictly")
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads of an auditor; 0: half of the cores that it may use, 1 at least"
    )
    backlog_max: int = Field(512, ge=1, description="claims that wait for an auditor until no more work is offered")
    kept_gib: float = Field(
        20.0, gt=0, description="most of the disk for versions that claims wait for; or half of what is free"
    )
    max_owner_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="most of a batch that is one owner's, once 2 / share owners are at work and others bring groups",
    )

    @field_validator("dtype")
    @classmethod
    def _only_what_is_proven(cls, dtype: str) -> str:
        if dtype != "float32":
            raise ValueError(
                f"{dtype[:32]} is not proven to judge as strictly as float32: the rounding of bfloat16 alone moves "
                "log-probabilities by 0.03 nats on the mean, more than what betrays some cheats"
            )
        return dtype


def _a_witness(text: str) -> str:
    try:
        key = NoteKey.parse(text)
    except CheckpointInvalid as error:
        raise ValueError(str(error)) from None
    if key.kind is not KeyKind.WITNESS:
        raise ValueError(f"{key.name[:80]} is the key of a log, not of a witness")
    return text


class LedgerSection(Section):
    """Who vouches for the round's ledger."""

    witnesses: tuple[Annotated[str, AfterValidator(_a_witness)], ...] = Field(
        (),
        max_length=WITNESSES_MAX,
        description="keys whose cosignatures are kept and shown; `ledger witness` tells one",
    )

    @cached_property
    def keys(self) -> tuple[NoteKey, ...]:
        """The same, read."""
        return tuple(dict.fromkeys(map(NoteKey.parse, self.witnesses)))
