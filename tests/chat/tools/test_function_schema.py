"""JSON schemas of Python functions and conversion of call arguments."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import Field

from afterglow.chat.tools.tool import parse_tools
from afterglow.errors import InvalidArgument


class Shop:
    def price(self, item, count: int = 1):  # type: ignore[no-untyped-def]
        """The price."""
        return f"{count} {item}"


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
    words: Optional[list[str]] = None,  # noqa: UP045 - users write it
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
                "country": {"type": "string", "default": "France"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
            "additionalProperties": False,
            "description": "Where.",
        },
        "days": {"type": "integer", "description": "How many days, at most ten."},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "The unit."},
        "kind": {"type": "string", "enum": ["short", "long"]},
        "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "words": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "extra": {"anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}]},
    }


def test_a_call_converts_its_arguments_to_the_hinted_types() -> None:
    (tool,) = parse_tools([weather])
    result = tool.call('{"place": {"city": "Paris"}, "days": 2.0, "unit": "fahrenheit", "limit": 3, "words": ["a"]}')
    assert result == (Place("Paris"), 2, Unit.FAHRENHEIT, "short", 3.0, ["a"], None)
    assert isinstance(result[1], int)


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
        ('{"place": {"city": "Paris", "town": "Paris"}, "days": 1}', "weather.arguments.place.town"),
        ('{"place": {}, "days": 1}', "weather.arguments.place.city"),
        ('{"place": 1, "days": 1}', "weather.arguments.place"),
        ('{"place": {"city": "P"}, "days": 1, "unit": "kelvin"}', "weather.arguments.unit"),
        ('{"place": {"city": "P"}, "days": 1, "kind": "huge"}', "weather.arguments.kind"),
        ('{"place": {"city": "P"}, "days": 1, "words": "a"}', "weather.arguments.words"),
    ],
)
def test_an_invalid_argument_is_reported_with_its_path(arguments: str, where: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_tools([weather])[0].call(arguments)
    assert error.value.name == where


def test_a_parameter_can_be_a_pydantic_model() -> None:
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


def label(path: Path, tags: set[str], id: uuid.UUID, day: datetime.date, only: frozenset[int] = frozenset()) -> Any:
    return path, tags, id, day, only


def test_sets_and_types_that_pydantic_knows_are_parameters() -> None:
    (tool,) = parse_tools([label])
    assert tool.parameters["properties"] == {
        "path": {"type": "string", "format": "path"},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "id": {"type": "string", "format": "uuid"},
        "day": {"type": "string", "format": "date"},
        "only": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    }
    id = uuid.uuid4()
    arguments = f'{{"path": "a", "tags": ["x", "y"], "id": "{id}", "day": "2024-02-29", "only": [1]}}'
    assert tool.call(arguments) == (Path("a"), {"x", "y"}, id, datetime.date(2024, 2, 29), frozenset({1}))
    with pytest.raises(InvalidArgument, match=r"label\.arguments\.day"):
        tool.call(arguments.replace("02-29", "02-30"))


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


def sphinx_style(a: int, b: str = "") -> None:
    """Do it.

    :param int a: The first.
    :param b: The second,
        on two lines.
    :returns: Nothing.
    """


@pytest.mark.parametrize("function", [numpy_style, sphinx_style])
def test_numpy_and_sphinx_docstrings_are_parsed(function: Any) -> None:
    (tool,) = parse_tools([function])
    assert tool.description == "Do it."
    assert tool.parameters["properties"] == {
        "a": {"type": "integer", "description": "The first."},
        "b": {"type": "string", "description": "The second, on two lines."},
    }


def variadic(*values: int) -> None: ...
def own_class(value: Shop) -> None: ...
def nested_class(value: list[Shop]) -> None: ...
def function_type(value: Callable[[int], int]) -> None: ...


@pytest.mark.parametrize("function", [variadic, own_class, nested_class, function_type])
def test_a_parameter_type_without_a_json_equivalent_is_rejected(function: Any) -> None:
    name = "values" if function is variadic else "value"
    with pytest.raises(InvalidArgument) as error:
        parse_tools([function])
    assert error.value.name == f"tools[0].{function.__name__}.{name}"


def test_pairs_number_keys_and_any_object_are_parameters() -> None:
    def take(pair: tuple[int, str], names: dict[int, str], value: object) -> Any:
        return pair, names, value

    (tool,) = parse_tools([take])
    assert tool.parameters["properties"]["pair"]["prefixItems"] == [{"type": "integer"}, {"type": "string"}]
    assert tool.call('{"pair": [1, "a"], "names": {"2": "b"}, "value": null}') == ((1, "a"), {2: "b"}, None)
    with pytest.raises(InvalidArgument, match=r"take\.arguments\.names.*valid integer"):
        tool.call('{"pair": [1, "a"], "names": {"two": "b"}, "value": null}')


def test_a_value_that_no_member_of_a_union_accepts_is_reported_without_internal_names() -> None:
    def take(value: list[int | Place]) -> Any:
        return value

    with pytest.raises(InvalidArgument) as error:
        parse_tools([take])[0].call('{"value": [1, "x"]}')
    assert error.value.name == "take.arguments.value[1]"
    assert "valid integer" in error.value.reason
    assert "object" in error.value.reason


def test_methods_and_unannotated_parameters_are_supported() -> None:
    (tool,) = parse_tools([Shop().price])
    assert tool.parameters["properties"] == {"item": {}, "count": {"type": "integer"}}
    assert tool.call('{"item": "pear"}') == "1 pear"


def test_an_unresolvable_hint_is_reported() -> None:
    def unresolvable(value: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(InvalidArgument, match=r"tools\[0\]\.unresolvable.*Nowhere"):
        parse_tools([unresolvable])


def test_annotations_describe_and_limit_a_parameter():
    def plan(
        city: Annotated[str, "Where to go", Field(min_length=2)],
        days: Annotated[int, Field(ge=1, le=9, description="How long")],
        stops: Annotated[list[str], Field(max_length=2)] = (),
    ) -> str:
        return f"{city} {days} {len(stops)}"

    (tool,) = parse_tools([plan])
    assert tool.parameters["properties"] == {
        "city": {"type": "string", "description": "Where to go", "minLength": 2},
        "days": {"type": "integer", "description": "How long", "minimum": 1, "maximum": 9},
        "stops": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    }
    assert tool.call('{"city": "Rome", "days": 3}') == "Rome 3 0"
    with pytest.raises(InvalidArgument, match=r"plan\.arguments\.days.*less than or equal to 9"):
        tool.call('{"city": "Rome", "days": 12}')
