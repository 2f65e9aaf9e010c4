"""Base of all bodies: unknown fields, implicit conversions and invalid Unicode are rejected.

A documented field belongs to one of three classes. It is *honoured*; or a *hint* (`hint`), which has no effect here and
is accepted, unless the server is strict; or *refused* (`unsupported`, `supports_only`), because ignoring it would
change the response. docs/fields.md is generated from these declarations.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Self, TypeAlias

import pydantic
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import PydanticCustomError, from_json
from starlette.datastructures import MutableHeaders

from afterglow.server.logs import get_record
from afterglow.server.settings import KeepAlive

RULE_KEY = "x-afterglow"  # of a `FieldRule` in the schema of a field


class StrictModel(pydantic.BaseModel):
    """Strict base class of bodies and their parts."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _reject_unknown_fields(cls, value: Any) -> Any:
        """Reject the first unknown field, with the nearest known one. Pydantic's own error does not know the class."""
        known = {field.alias or name: field for name, field in cls.model_fields.items()}
        if not isinstance(value, dict) or value.keys() <= known.keys() or cls.model_config["extra"] != "forbid":
            return value
        name = next(name for name in value if name not in known)
        nearest = difflib.get_close_matches(name, known, n=1)
        suggestion = f"; did you mean `{nearest[0]}`?" if nearest else ""
        raise PydanticCustomError(
            "unknown_parameter", "is not a field of this request{suggestion}", {"name": name, "suggestion": suggestion}
        )

    @pydantic.field_validator("*", mode="after")
    @classmethod
    def _apply_field_class(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Record hints, and reject values of documented fields that are not supported, with the reason."""
        rule = get_rule(cls.model_fields[info.field_name or ""])
        if value is None or rule is None:
            return value
        if "same_as" in rule:
            _check_synonym(info, rule["same_as"], value)
            return value
        if value in rule["only"]:
            return value
        if "hint" in rule and get_record().accept_hint(rule["hint"] or str(info.field_name)):
            return value
        if not rule["only"]:
            raise PydanticCustomError("unsupported_parameter", "is not supported: {reason}", {"reason": rule["reason"]})
        values = " or ".join(map(json.dumps, rule["only"]))
        context = {"values": values, "reason": rule["reason"]}
        raise PydanticCustomError("unsupported_parameter", "must be {values}: {reason}", context)

    @pydantic.model_validator(mode="after")
    def _apply_synonyms(self) -> Self:
        """Copy fields that are other names of a field to this field."""
        rules = ((name, get_rule(field)) for name, field in type(self).model_fields.items())
        values = {
            rule["same_as"]: value
            for name, rule in rules
            if rule is not None and "same_as" in rule and (value := getattr(self, name)) is not None
        }
        self.__dict__.update(values)  # the model is frozen
        return self


def list_synonyms(model: type[StrictModel]) -> set[str]:
    """List the fields of a body that are other names of a field."""
    rules = {name: get_rule(field) for name, field in model.model_fields.items()}
    return {name for name, rule in rules.items() if rule is not None and "same_as" in rule}


def convert_integral_floats(values: Any) -> Any:
    """Convert 2048.0 to 2048 in the fields of a body: some languages have no integers. Floats accept integers, too.

    >>> convert_integral_floats({"n_predict": 4.0, "temperature": 0.5})
    {'n_predict': 4, 'temperature': 0.5}
    """
    if not isinstance(values, dict):
        return values
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in values.items()
    }


def get_rule(field: pydantic.fields.FieldInfo) -> dict[str, Any] | None:
    """Return the rule of a field that is a hint, restricted, or another name of a field."""
    extra = field.json_schema_extra
    rule = extra.get(RULE_KEY) if isinstance(extra, dict) else None
    return rule if isinstance(rule, dict) else None


def _check_synonym(info: pydantic.ValidationInfo, target: str, value: Any) -> None:
    if info.data.get(target) not in (None, value):
        raise PydanticCustomError("same_field", "is another name of `{target}`: set one of them", {"target": target})


def _declare(description: str, alias: str | None = None, **rule: Any) -> Any:
    return pydantic.Field(None, alias=alias, description=description, json_schema_extra={RULE_KEY: rule})


def same_as(target: str) -> Any:
    """Declare another name of a field of the same type that is declared before."""
    return _declare(f"Same as `{target}`.", same_as=target)


def supports_only(*allowed: Any, reason: str, alias: str | None = None) -> Any:
    """Declare a documented field of which only some values are supported. `alias`: its name, if Python reserves it."""
    values = " or ".join(json.dumps(value) for value in allowed)
    return _declare(f"Only {values}: {reason}.", alias, only=list(allowed), reason=reason)


def hint(reason: str, *allowed: Any, name: str = "", alias: str | None = None) -> Any:
    """Declare a documented field that has no effect. The values `allowed` describe what is done anyway.

    The response header `x-afterglow-ignored` and the log name it, with `name` if the field is nested. A strict server
    (`serve --strict`) rejects it.
    """
    return _declare(f"Accepted without effect: {reason}.", alias, only=list(allowed), reason=reason, hint=name or alias)


def unsupported(reason: str) -> Any:
    """Declare a documented field that is not supported. Only null is accepted."""
    return _declare(f"Not supported: {reason}.", only=[], reason=reason)


def _check_finite(value: Any) -> Any:
    """Reject numbers that overflow to infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("finite", "must not contain numbers that overflow") from None
    return value


JsonObject: TypeAlias = Annotated[dict[str, Any], pydantic.AfterValidator(_check_finite)]
NameField: TypeAlias = Annotated[str, pydantic.Field(max_length=256)]
OptionalModel: TypeAlias = Annotated[NameField | None, pydantic.Field(description="Default: the only served model.")]
Label: TypeAlias = Annotated[
    str | None, pydantic.Field(max_length=512, description="Label of the client; has no effect.")
]
KeepAliveField: TypeAlias = Annotated[
    KeepAlive | None,
    pydantic.Field(
        description="How long the model stays loaded after the request: seconds, or a duration such as `5m`; negative: "
        "for ever; 0: it is unloaded after the request. Unset: as in the settings.",
    ),
]
MediaID: TypeAlias = Annotated[
    Annotated[str, pydantic.Field(pattern="^[0-9a-fA-F]{16}$")] | None,
    pydantic.Field(description="64-bit FNV-1a hash of the raw bytes, in hexadecimal."),
]
Metadata: TypeAlias = Annotated[
    dict[
        Annotated[str, pydantic.Field(max_length=64)],
        Annotated[str, pydantic.Field(max_length=512)],
    ],
    pydantic.Field(max_length=16, description="Labels of the client; returned with the response."),
]


class StrictRequest(Request):
    """Request that parses JSON strictly: no NaN, no lone surrogates, bounded nesting.

    Every body is JSON, whatever its content type: clients of local servers often send none, or that of a form.
    """

    async def json(self) -> Any:
        """Parse the body."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class StrictRoute(APIRoute):
    """Route that parses its requests with `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that receives a `StrictRequest`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            scope = {**request.scope, "headers": list(request.scope["headers"])}
            MutableHeaders(scope=scope)["content-type"] = "application/json"
            return await handler(StrictRequest(scope, request.receive))

        return handle
