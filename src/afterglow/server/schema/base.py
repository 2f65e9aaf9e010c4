"""Base of all bodies: unknown fields, implicit conversions and invalid Unicode are rejected.

A documented field belongs to one of three classes. It is *honoured*; or a *hint* (`hint`), which has no effect here and
is accepted, unless the server is strict; or *refused* (`unsupported`, `supports_only`), because ignoring it would
change the response.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeAlias

import pydantic
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import PydanticCustomError, from_json

from afterglow.server.logs import get_record


class StrictModel(pydantic.BaseModel):
    """Strict base class of bodies and their parts."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @pydantic.field_validator("*", mode="after")
    @classmethod
    def _apply_field_class(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Record hints, and reject values of documented fields that are not supported, with the reason."""
        rule = cls.model_fields[info.field_name or ""].json_schema_extra
        if value is None or not isinstance(rule, dict) or "x-reason" not in rule:
            return value
        allowed, reason = rule["x-only"], rule["x-reason"]
        if isinstance(allowed, list) and value in allowed:
            return value
        record = get_record()
        if "x-hint" in rule and not record.refuses_hints:
            record.add_ignored(str(rule["x-hint"] or info.field_name))
            return value
        if not allowed:
            raise PydanticCustomError("unsupported_parameter", "is not supported: {reason}", {"reason": reason})
        values = " or ".join(json.dumps(value) for value in allowed) if isinstance(allowed, list) else ""
        message = "must be {values}: {reason}"
        raise PydanticCustomError("unsupported_parameter", message, {"values": values, "reason": reason})


def supports_only(*allowed: Any, reason: str, alias: str | None = None) -> Any:
    """Declare a documented field of which only some values are supported. `alias`: its name, if Python reserves it."""
    values = " or ".join(json.dumps(value) for value in allowed)
    rule: dict[str, Any] = {"x-only": list(allowed), "x-reason": reason}
    return pydantic.Field(None, alias=alias, description=f"Only {values}: {reason}.", json_schema_extra=rule)


def hint(reason: str, *allowed: Any, name: str = "") -> Any:
    """Declare a documented field that has no effect. The values `allowed` describe what is done anyway.

    The response header `x-afterglow-ignored` and the log name it, with `name` if the field is nested. A strict server
    (`serve --strict`) rejects it.
    """
    rule: dict[str, Any] = {"x-only": list(allowed), "x-reason": reason, "x-hint": name}
    return pydantic.Field(None, description=f"Accepted without effect: {reason}.", json_schema_extra=rule)


def unsupported(reason: str) -> Any:
    """Declare a documented field that is not supported. Only null is accepted."""
    rule: dict[str, Any] = {"x-only": [], "x-reason": reason}
    return pydantic.Field(None, description=f"Not supported: {reason}.", json_schema_extra=rule)


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
    """Request that parses JSON strictly: no NaN, no lone surrogates, bounded nesting."""

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
            return await handler(StrictRequest(request.scope, request.receive))

        return handle
