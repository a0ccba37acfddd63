"""Settings of a built-in reward from the environment variables of its process: `SWARM_CODE_TIMEOUT_S` and the like."""

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from protocol.errors import ConfigInvalid

Settings = TypeVar("Settings", bound=BaseModel)


def from_environment(model: type[Settings], prefix: str, environment: Mapping[str, str]) -> Settings:
    """Return the settings whose variables are `prefix` and the field's name in capitals; the others keep defaults."""
    given = {
        name: environment[variable]
        for name in model.model_fields
        if (variable := variable_of(prefix, name)) in environment
    }
    try:
        return model.model_validate_strings(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = variable_of(prefix, str(first["loc"][0])) if first["loc"] else prefix
        raise ConfigInvalid(
            f"{name}: {first['msg']}.",
            hint="Set it, and name it in reward.variables, so that task processes get it.",
        ) from None


def variable_of(prefix: str, name: str) -> str:
    return f"{prefix}{name.upper()}"
