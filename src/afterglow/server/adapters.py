"""LoRA adapters of requests: from the name of the model (`base+style@0.8`) and from the field `lora`."""

from __future__ import annotations

from collections.abc import Sequence

from afterglow.api.adapters import resolve_lora
from afterglow.api.model import Model
from afterglow.errors import InvalidArgument
from afterglow.server.errors import invalid_request_error
from afterglow.server.models import ModelRegistry
from afterglow.server.schema.sampling import LoraField

Lora = list[str | tuple[str, float]]
"""Adapters as `Model.build_request` takes them."""


def build_lora(models: ModelRegistry, model: Model, name: str | None, fields: Sequence[LoraField] | None) -> Lora:
    """Return the adapters of a request for the model with this name. Raises status 400 for unknown ones.

    A request that names none, neither by the name of the model nor by the field, has the default ones of the model.
    """
    named = parse_lora_suffix(models.split_name(name)[1])
    try:
        resolve_lora(named, model.adapters, model.name)
    except InvalidArgument as error:
        reason = str(error).removeprefix("`lora` ")
        raise invalid_request_error("model", reason if reason.startswith("'") else f"`model` {reason}") from None
    if not named and fields is None:
        return list(models.get_requested_slot(name).default_lora)
    return [*named, *(_convert_field(model, field) for field in fields or ())]


def set_default_lora(models: ModelRegistry, model: Model, name: str | None, fields: Sequence[LoraField]) -> None:
    """Set the adapters of requests that name none. Raises status 400 for unknown ones."""
    try:
        adapters = resolve_lora([_convert_field(model, field) for field in fields], model.adapters, model.name)
    except InvalidArgument as error:
        raise invalid_request_error("lora", str(error)) from None
    models.get_requested_slot(name).default_lora = adapters


def refuse_adapters(models: ModelRegistry, name: str | None, work: str) -> None:
    """Raise status 400 if the name of a model asks for adapters, which `work` does not use."""
    if models.split_name(name)[1]:
        raise invalid_request_error("model", f"`model` must not name adapters: {work} uses the base model")


def parse_lora_suffix(suffix: str) -> Lora:
    """Parse what follows the name of a model.

    >>> parse_lora_suffix("+style@0.8+formal")
    [('style', 0.8), 'formal']
    """
    adapters: Lora = []
    for part in suffix.split("+")[1:]:
        name, separator, scale = part.partition("@")
        try:
            adapters.append((name, float(scale)) if separator else name)
        except ValueError:
            raise invalid_request_error("model", f"the scale of {name!r} must be a number, not {scale!r}") from None
    return adapters


def _convert_field(model: Model, field: LoraField) -> str | tuple[str, float]:
    name = field.name
    if field.id is not None:
        if field.id >= len(model.adapters):
            count = len(model.adapters)
            raise invalid_request_error("lora", f"{model.name!r} has {count} adapters; there is no `id` {field.id}")
        name = model.adapters[field.id].name
    assert name is not None
    return name if field.scale is None else (name, field.scale)
