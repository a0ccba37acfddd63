"""The base class of every table of the operator's file."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


def _is_device(said: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", said):
        raise ValueError(f"'{said}' is not a device. Allowed: cpu, cuda or cuda:N")
    return said


Device = Annotated[str, AfterValidator(_is_device)]
"""A device of torch on which learner and auditor were tried."""


class Section(BaseModel):
    """A table of the file: frozen, strict about names, and its field descriptions are its manual."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
