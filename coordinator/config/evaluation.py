"""How versions are measured on problems that are not trained on."""

from typing import Literal

from pydantic import Field

from coordinator.config.section import Section
from protocol import limits


class EvalSection(Section):
    """Evaluations of versions, sampled by the nodes like any other work."""

    every: int = Field(0, ge=0, description="versions from one evaluation to the next; 0 is none at all")
    before_train: bool = Field(True, description="measure the first version before anything is trained on")
    splits: tuple[Literal["held_out", "validation"], ...] = Field(
        ("held_out",), min_length=1, description="held_out, validation: the best version is that on the first"
    )
    problems: int = Field(64, ge=1, le=10_000, description="n: problems of each split; fewer if it has fewer")
    samples: int = Field(8, ge=1, le=limits.SAMPLES_MAX, description="k: samples of each, as for training")
    share: float = Field(0.25, gt=0, le=1, description="most of the nodes at work that measure while others train")
    patience_s: float = Field(600.0, gt=0, description="after this an evaluation ends with what it has")
    solved: float = Field(1.0, description="a sample with this score or more counts as right in pass@k")
