"""What all bodies share: unknown fields are refused, numbers are numbers, and text is Unicode."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeAlias

import pydantic
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import PydanticCustomError, from_json


class StrictModel(pydantic.BaseModel):
    """A body, or a part of one."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @pydantic.field_validator("*", mode="after")
    @classmethod
    def _reject_unsupported(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Refuse what is documented and not honoured here, by name and with the reason."""
        rule = cls.model_fields[info.field_name or ""].json_schema_extra
        if value is None or not isinstance(rule, dict) or "x-reason" not in rule:
            return value
        allowed, reason = rule["x-only"], rule["x-reason"]
        if isinstance(allowed, list) and value in allowed:
            return value
        if not allowed:
            raise PydanticCustomError("unsupported_parameter", "is not supported: {reason}", {"reason": reason})
        shown = " or ".join(json.dumps(one) for one in allowed) if isinstance(allowed, list) else ""
        message = "can only be {shown}: {reason}"
        raise PydanticCustomError("unsupported_parameter", message, {"shown": shown, "reason": reason})


def supports_only(*allowed: Any, reason: str) -> Any:
    """A documented field of which only some values can be honoured here."""
    shown = " or ".join(json.dumps(one) for one in allowed)
    rule: dict[str, Any] = {"x-only": list(allowed), "x-reason": reason}
    return pydantic.Field(None, description=f"Only {shown}: {reason}.", json_schema_extra=rule)


def unsupported(reason: str) -> Any:
    """A documented field that cannot be honoured here: it may be null."""
    rule: dict[str, Any] = {"x-only": [], "x-reason": reason}
    return pydantic.Field(None, description=f"Refused: {reason}.", json_schema_extra=rule)


def _check_finite(value: Any) -> Any:
    """JSON as it is; numbers so large that they became infinite are none."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("finite", "must not have numbers that are too large") from None
    return value


JsonObject: TypeAlias = Annotated[dict[str, Any], pydantic.AfterValidator(_check_finite)]
NameField: TypeAlias = Annotated[str, pydantic.Field(max_length=256)]
Label: TypeAlias = Annotated[
    str | None, pydantic.Field(max_length=512, description="A label of yours; it changes nothing here.")
]
Metadata: TypeAlias = Annotated[
    dict[
        Annotated[str, pydantic.Field(max_length=64)],
        Annotated[str, pydantic.Field(max_length=512)],
    ],
    pydantic.Field(max_length=16, description="Labels of yours; they come back with the answer."),
]


class StrictRequest(Request):
    """A request whose JSON is exactly JSON: no NaN, no lone surrogates, no endless nesting."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class StrictRoute(APIRoute):
    """A route that reads its requests strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle
