"""Settings of publication: chunks, patches, kept versions and copies."""

from pydantic import Field, field_validator

from coordinator.config.section import Section
from protocol import limits
from protocol.policy.origin import OriginUrl

UPLOAD = r"^$|^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_~][A-Za-z0-9._~-]*)*$"
"""The form of an upload address, without characters that a signed address would have to escape."""


class PublishSection(Section):
    """Publication of versions: chunks, patches, kept versions and copies."""

    chunk_size_bytes: int = Field(
        0,
        ge=0,
        le=limits.CHUNK_MAX_BYTES,
        description="size of a chunk; 0: chosen by the size of the version, 64 KiB to 4 MiB",
    )
    patches: bool = Field(True, description="publish patches instead of whole files where they are smaller")
    keep: int = Field(
        0,
        ge=0,
        le=limits.VERSION_MAX,
        description="newest versions kept for `policy rollback`, beside those that rollouts may still use",
    )
    keep_h: float = Field(0.0, ge=0, description="also keep versions younger than this")
    keep_every: int = Field(0, ge=0, le=limits.VERSION_MAX, description="keep every Nth version for ever; 0: none")
    timestamp_lifetime_s: float = Field(
        600.0, gt=0, description="lifetime of a signed timestamp; nodes stop working when it has expired"
    )
    origins: tuple[OriginUrl, ...] = Field(
        (),
        max_length=limits.ORIGINS_MAX,
        description="URLs of copies of public/; nodes try them before the coordinator",
    )
    upload: str = Field(
        "",
        pattern=UPLOAD,
        description="s3://bucket/prefix to which public/ is uploaded; credentials from AWS_* variables",
    )
    upload_patience_s: float = Field(60.0, ge=0, description="maximum time that a new version waits for its upload")

    @field_validator("chunk_size_bytes")
    @classmethod
    def _is_worth_a_frame(cls, size_bytes: int) -> int:
        if 0 < size_bytes < limits.KIB:
            raise ValueError("a chunk has at least 1024 bytes; 0 chooses a size by the version")
        return size_bytes
