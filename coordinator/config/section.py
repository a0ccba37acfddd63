"""What every table of the operator's file is: strict about names, frozen, and its descriptions are its manual."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the file: frozen, strict about names, and its field descriptions are its manual."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
