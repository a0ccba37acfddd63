"""Schemas of functions are as chat templates expect them, and arguments are checked by them."""

from typing import Any, Literal

import pytest

from coordinator.environments.tool_schemas import BadArguments, arguments_for, schema_of
from protocol.errors import ConfigInvalid


def google(city: str, unit: Literal["C", "F"] = "C", days: list[int] | None = None) -> str:
    """Get the weather
    of a city.

    Args:
        city (str): The city, such as
            "Paris: France".
        unit: The unit.

    Returns:
        unit: The text.
    """
    return f"{city} {unit} {days}"


def numpy(a: int, b: float) -> float:
    """Add two numbers.

    Parameters
    ----------
    a : int
        The first
        number.
    b
        The second.

    Returns
    -------
    a : float
        The sum.
    """
    return a + b


def sphinx(a: int, b: Any = None) -> int:
    """Count.

    :param a: The start
        of it.
    :param object b: The end.
    :return: A number.
    """
    return a


def test_a_schema_has_types_and_descriptions() -> None:
    assert schema_of(google) == {
        "type": "function",
        "function": {
            "name": "google",
            "description": "Get the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": 'The city, such as "Paris: France".'},
                    "unit": {"type": "string", "enum": ["C", "F"], "description": "The unit."},
                    "days": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
                },
                "required": ["city"],
            },
        },
    }


def descriptions(function: Any) -> dict[str, str]:
    properties = schema_of(function)["function"]["parameters"]["properties"]
    return {name: value.get("description", "") for name, value in properties.items()}


def test_docstrings_of_other_forms_are_read() -> None:
    assert descriptions(numpy) == {"a": "The first number.", "b": "The second."}
    assert descriptions(sphinx) == {"a": "The start of it.", "b": "The end."}


def test_a_method_has_the_same_schema_with_and_without_an_instance() -> None:
    class Game:
        def move(self, to: str) -> str:
            """Move."""
            return to

    assert schema_of(Game.move) == schema_of(Game().move)
    assert list(descriptions(Game.move)) == ["to"]


def test_arguments_are_converted_to_the_types_of_the_parameters() -> None:
    assert arguments_for(google, {"city": "Paris", "days": ["1", 2]}) == {"city": "Paris", "days": [1, 2]}
    assert arguments_for(numpy, {"a": "3", "b": 2}) == {"a": 3, "b": 2.0}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "city is missing"),
        ({"city": 3}, "valid string"),
        ({"city": "Paris", "unit": "K"}, "'C' or 'F'"),
        ({"city": "Paris", "town": 1}, "no parameter 'town'"),
        ({"city": "Paris", "days": ["x"] * 1000}, "valid integer"),
    ],
)
def test_arguments_that_do_not_fit_are_named(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadArguments, match=reason) as failure:
        arguments_for(google, given)
    assert len(str(failure.value)) < 500


def open_ended(*anything: int) -> None: ...


def unnamed(a: int, /) -> None: ...


def unknown(a: "NoSuchType") -> None: ...  # type: ignore[name-defined]  # noqa: F821  # the mistake to report


def strange(a: "Strange") -> None: ...


class Strange:
    """A type of which pydantic knows nothing."""


@pytest.mark.parametrize("function", [open_ended, unnamed, unknown, strange])
def test_a_function_that_cannot_be_a_tool_is_refused(function: Any) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be a tool"):
        schema_of(function)
