"""The base class of every table of the operator's file."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the file: frozen, strict about names, and its field descriptions are its manual."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
