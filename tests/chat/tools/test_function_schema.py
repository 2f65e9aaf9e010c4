"""Are tools what their functions and dictionaries say, and are calls checked before they are made?"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Optional

import pytest

from afterglow.chat.tools import Tool, parse_tools
from afterglow.errors import InvalidArgument, UnsupportedOperation


def function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


def test_openais_dictionaries_are_read() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    (tool,) = parse_tools([function(description="Do it.", parameters=schema, strict=True)])
    assert tool == Tool(name="f", description="Do it.", parameters=schema, strict=True)
    assert tool.definition == function(description="Do it.", parameters=schema, strict=True)


def test_without_parameters_there_are_none() -> None:
    assert parse_tools([function()])[0].parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ("f", "tools"),
        ([1], "tools[0]"),
        ([function(), {"type": "web"}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{**function(), "extra": 1}], "tools[0].extra"),
        ([function(extra=1)], "tools[0].function.extra"),
        ([function(name=None)], "tools[0].function.name"),
        ([function(name="no spaces")], "tools[0].function.name"),
        ([function(name="x" * 65)], "tools[0].function.name"),
        ([function(name="x\n")], "tools[0].function.name"),
        ([function(), function()], "tools[1].function.name"),
        ([function(description=1)], "tools[0].function.description"),
        ([function(parameters=[])], "tools[0].function.parameters"),
        ([function(parameters={"type": "array"})], "tools[0].function.parameters.type"),
        ([function(parameters={"properties": []})], "tools[0].function.parameters.properties"),
        ([function(parameters={"required": [1]})], "tools[0].function.parameters.required"),
        ([function(parameters={"properties": {"a": object}})], "tools[0].function.parameters"),
        ([function(strict="yes")], "tools[0].function.strict"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(value: Any, where: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_tools(value)
    assert error.value.name == where


class Unit(Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


@dataclass
class Place:
    city: str
    country: str = "France"
    tags: list[str] = field(default_factory=list)


def weather(
    place: Place,
    days: int,
    unit: Unit = Unit.CELSIUS,
    kind: Literal["short", "long"] = "short",
    limit: float | None = None,
    words: Optional[list[str]] = None,  # noqa: UP045 - people write it
    extra: dict[str, int] | None = None,
) -> Any:
    """Tell the weather.

    It may take a while.

    Args:
        place: Where.
        days (int): How many days,
            at most ten.
        unit: The unit.

    Returns:
        The weather.
    """
    return place, days, unit, kind, limit, words, extra


def test_a_function_becomes_a_tool() -> None:
    (tool,) = parse_tools([weather])
    assert (tool.name, tool.description) == ("weather", "Tell the weather.\n\nIt may take a while.")
    assert tool.parameters["required"] == ["place", "days"]
    assert tool.parameters["additionalProperties"] is False
    assert tool.parameters["properties"] == {
        "place": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "country": {"type": "string"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
            "additionalProperties": False,
            "description": "Where.",
        },
        "days": {"type": "integer", "description": "How many days, at most ten."},
        "unit": {"enum": ["celsius", "fahrenheit"], "description": "The unit."},
        "kind": {"enum": ["short", "long"]},
        "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "words": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "extra": {"anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}]},
    }


def test_a_call_converts_its_arguments() -> None:
    (tool,) = parse_tools([weather])
    made = tool.call('{"place": {"city": "Paris"}, "days": 2.0, "unit": "fahrenheit", "limit": 3, "words": ["a"]}')
    assert made == (Place("Paris"), 2, Unit.FAHRENHEIT, "short", 3.0, ["a"], None)
    assert isinstance(made[1], int)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ("{", "weather.arguments"),
        ("[]", "weather.arguments"),
        ('{"days": 1}', "weather.arguments.place"),
        ('{"place": {"city": "Paris"}, "days": 1, "more": 1}', "weather.arguments.more"),
        ('{"place": {"city": "Paris"}, "days": "1"}', "weather.arguments.days"),
        ('{"place": {"city": "Paris"}, "days": true}', "weather.arguments.days"),
        ('{"place": {"city": 1}, "days": 1}', "weather.arguments.place.city"),
        ('{"place": {"town": "Paris"}, "days": 1}', "weather.arguments.place.town"),
        ('{"place": {}, "days": 1}', "weather.arguments.place.city"),
        ('{"place": 1, "days": 1}', "weather.arguments.place"),
        ('{"place": {"city": "P"}, "days": 1, "unit": "kelvin"}', "weather.arguments.unit"),
        ('{"place": {"city": "P"}, "days": 1, "kind": "huge"}', "weather.arguments.kind"),
        ('{"place": {"city": "P"}, "days": 1, "words": "a"}', "weather.arguments.words"),
    ],
)
def test_arguments_that_do_not_fit_are_named_by_their_place(arguments: str, where: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_tools([weather])[0].call(arguments)
    assert error.value.name == where


def test_a_tool_without_a_function_cannot_be_called() -> None:
    with pytest.raises(UnsupportedOperation, match="without a function"):
        parse_tools([function()])[0].call("{}")


def test_pydantic_models_are_parameters_too() -> None:
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", count=(int, ...))
    outer = pydantic.create_model("Outer", inner=(inner, ...), name=(str, "x"))

    def take(value: Any) -> Any:
        return value

    take.__annotations__["value"] = outer
    (tool,) = parse_tools([take])
    assert "$ref" not in str(tool.parameters)
    assert tool.parameters["properties"]["value"]["properties"]["inner"]["properties"]["count"]["type"] == "integer"
    assert tool.call('{"value": {"inner": {"count": 2}}}').inner.count == 2
    with pytest.raises(InvalidArgument, match=r"take\.arguments\.value"):
        tool.call('{"value": {"inner": {}}}')


def numpy_style(a: int, b: str = "") -> None:
    """Do it.

    Parameters
    ----------
    a : int
        The first.
    b : str, optional
        The second,
        on two lines.

    Returns
    -------
    None
    """


def field_style(a: int, b: str = "") -> None:
    """Do it.

    :param int a: The first.
    :param b: The second,
        on two lines.
    :returns: Nothing.
    """


@pytest.mark.parametrize("function", [numpy_style, field_style])
def test_other_styles_of_docstrings_are_read(function: Any) -> None:
    (tool,) = parse_tools([function])
    assert tool.description == "Do it."
    assert tool.parameters["properties"] == {
        "a": {"type": "integer", "description": "The first."},
        "b": {"type": "string", "description": "The second, on two lines."},
    }


def star(*values: int) -> None: ...
def strange(value: object) -> None: ...
def pair(value: tuple[int, str]) -> None: ...
def keys(value: dict[int, str]) -> None: ...


@pytest.mark.parametrize("function", [star, strange, pair, keys])
def test_a_parameter_that_json_cannot_write_is_refused(function: Any) -> None:
    name = "values" if function is star else "value"
    with pytest.raises(InvalidArgument) as error:
        parse_tools([function])
    assert error.value.name == f"tools[0].{function.__name__}.{name}"


def test_methods_and_functions_without_hints_are_tools_too() -> None:
    class Shop:
        def price(self, item, count: int = 1):  # type: ignore[no-untyped-def]
            """The price."""
            return f"{count} {item}"

    (tool,) = parse_tools([Shop().price])
    assert tool.parameters["properties"] == {"item": {}, "count": {"type": "integer"}}
    assert tool.call('{"item": "pear"}') == "1 pear"


def test_a_hint_that_cannot_be_found_is_named() -> None:
    def lost(value: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(InvalidArgument, match=r"tools\[0\]\.lost.*Nowhere"):
        parse_tools([lost])


def test_a_tool_made_by_hand_can_be_called() -> None:
    tool = Tool(name="f", parameters={"type": "object", "properties": {"a": {}}}, function=lambda **given: given)
    assert tool.call('{"a": [1]}') == {"a": [1]}
