"""Settings of audits and of the ledger: how much is audited, how it is judged, and which witnesses sign."""

import re
from functools import cached_property
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator

from coordinator.config.section import Device, Section
from ledger.note import KeyKind, NoteKey
from ledger.witness import WITNESSES_MAX
from protocol import limits
from protocol.errors import CheckpointInvalid


class AuditSection(Section):
    """Settings of audits: their share, tolerances, device and limits."""

    tolerance: str = Field(
        "", description="tolerance class for all nodes if classes is empty; empty: each node's own class"
    )
    classes: tuple[str, ...] = Field(
        (),
        max_length=limits.CLASSES_MAX,
        description="accepted compute classes, each engine/dtype/device; every node is audited by its class",
    )
    probes: tuple[str, ...] = Field(
        (),
        max_length=limits.PROBES_MAX,
        description="ids of your own nodes, used for calibration in addition to fleet.local_nodes",
    )
    neighbours: int = Field(
        3,
        ge=0,
        le=16,
        description="each claim is compared with the version before; a doubtful one with this many: 1, 2, 4, … before",
    )
    first_groups: int = Field(
        10,
        ge=0,
        description="audit the first groups of an owner in full; after N groups the share is this number / N",
    )
    floor: float = Field(
        0.05, ge=0, le=1, description="minimum audited share; 0 together with first_groups = 0: no audits"
    )
    trusted_groups: int = Field(1000, ge=1, description="validated groups after which trusted_floor applies")
    trusted_floor: float = Field(0.02, ge=0, le=1, description="minimum audited share of a trusted owner")
    escrow_factor: float = Field(
        1.25, ge=0, description="unaudited groups held in escrow, as a multiple of (1 - rate) / rate"
    )
    epoch_groups: int = Field(256, ge=1, description="claims per audit draw: the secret is revealed after this many")
    timeout_s: float = Field(
        120.0,
        gt=0,
        description="stop a replay without progress after this time; its cases go to another auditor",
    )
    device: Device = Field(
        "cpu",
        description="cpu, cuda or cuda:N for audit replays; do not share a GPU with the learner or a node",
    )
    dtype: str = Field("float32", description="precision of audit replays; only float32 is accepted")
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads of an auditor; 0: half of the available cores, at least 1"
    )
    backlog_max: int = Field(
        512, ge=1, description="claims waiting for an audit at which the coordinator stops offering work"
    )
    kept_gib: float = Field(
        20.0,
        gt=0,
        description="disk limit, in GiB, for versions needed by waiting audits; at most half of the free space",
    )
    max_owner_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="maximum share of a batch from one owner, once at least 2 / share owners are active",
    )

    @field_validator("dtype")
    @classmethod
    def _only_what_is_proven(cls, dtype: str) -> str:
        if dtype != "float32":
            raise ValueError(
                f"{dtype[:32]} is not proven to judge as strictly as float32: the rounding of bfloat16 alone moves "
                "log-probabilities by 0.03 nats on the mean, more than the difference that shows some cheats"
            )
        return dtype


def _a_witness(text: str) -> str:
    written, blank, address = text.partition(" ")
    try:
        key = NoteKey.parse(written)
    except CheckpointInvalid as error:
        raise ValueError(str(error)) from None
    if key.kind is not KeyKind.WITNESS:
        raise ValueError(f"{key.name[:80]} is the key of a log, not of a witness")
    if blank and not _is_address(address):
        raise ValueError(f"{address[:80]!r} is not the address of a witness, such as https://witness.example.org")
    return text


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_host = bool(parts.hostname and parts.hostname.encode("idna")) and parts.port != 0
        return is_host and parts.scheme in ("http", "https") and not re.search(r"[\s?#@]", text)
    except ValueError:  # no IPv6 address in brackets, no name for DNS, or a port beyond the last one
        return False


class LedgerSection(Section):
    """Witnesses of the round's ledger."""

    witnesses: tuple[Annotated[str, AfterValidator(_a_witness)], ...] = Field(
        (),
        max_length=WITNESSES_MAX,
        description="keys of witnesses whose cosignatures are stored and shown, each followed by a space and an "
        "address if the coordinator calls this witness (C2SP tlog-witness); `ledger witness` prints a key",
    )

    @cached_property
    def keys(self) -> tuple[NoteKey, ...]:
        """Return the parsed keys."""
        return tuple(dict.fromkeys(NoteKey.parse(text.partition(" ")[0]) for text in self.witnesses))

    @cached_property
    def addresses(self) -> dict[NoteKey, str]:
        """Return the addresses of the witnesses that are called."""
        parts = [text.partition(" ") for text in self.witnesses]
        return {NoteKey.parse(key): address.rstrip("/") for key, _, address in parts if address}
