"""Which prompts are worth a group."""

from pydantic import Field

from coordinator.config.section import Section


class SelectionSection(Section):
    """Prompts by what their groups came to; as it stands, all are taken in their order."""

    filter_after: int = Field(
        0, ge=0, description="groups in a row of equal rewards after which a prompt is left out; 0: never"
    )
    probe_every: int = Field(4, ge=2, le=1000, description="of so many times that a prompt comes up, it is taken once")
    window: int = Field(64, ge=1, le=1024, description="prompts that are looked at together")
    share: float = Field(1.0, gt=0, le=1, description="of a window that is taken, the most promising ones; 1: all")
    refill: float = Field(
        0.0,
        ge=0,
        le=16,
        description="groups of equal rewards that others replace, in parts of a batch; 0: none",
    )
    exploration: float = Field(
        0.5, ge=0, description="what it is worth that a prompt was seldom seen, in units of reward"
    )
