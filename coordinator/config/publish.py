"""How versions travel."""

from pydantic import Field, field_validator

from coordinator.config.section import Section
from protocol import limits
from protocol.policy.origin import OriginUrl

UPLOAD = r"^$|^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_~][A-Za-z0-9._~-]*)*$"
"""No character that a signed address would have to escape."""


class PublishSection(Section):
    """How versions travel."""

    chunk_size_bytes: int = Field(
        0,
        ge=0,
        le=limits.CHUNK_MAX_BYTES,
        description="size of a chunk; 0 takes what fits the version, 64 KiB to 4 MiB",
    )
    patches: bool = Field(True, description="publish what changed in place of whole files, where that is smaller")
    keep: int = Field(
        0,
        ge=0,
        le=limits.VERSION_MAX,
        description="newest versions that are kept whole for `policy rollback`; what rollouts may still use always is",
    )
    keep_h: float = Field(0.0, ge=0, description="versions that are younger are kept whole, too")
    keep_every: int = Field(
        0, ge=0, le=limits.VERSION_MAX, description="every so many versions, one is kept whole for ever; 0: none"
    )
    timestamp_lifetime_s: float = Field(600.0, gt=0, description="how long nodes may work without fresh proof")
    origins: tuple[OriginUrl, ...] = Field(
        (),
        max_length=limits.ORIGINS_MAX,
        description="URLs that hold copies of public/; nodes ask them before this one",
    )
    upload: str = Field(
        "", pattern=UPLOAD, description="s3://bucket/prefix to copy public/ to; keys from AWS_* variables"
    )
    upload_patience_s: float = Field(60.0, ge=0, description="how long a new version waits for its upload at most")

    @field_validator("chunk_size_bytes")
    @classmethod
    def _is_worth_a_frame(cls, size_bytes: int) -> int:
        if 0 < size_bytes < limits.KIB:
            raise ValueError("a chunk has at least 1024 bytes; 0 takes what fits the version")
        return size_bytes
