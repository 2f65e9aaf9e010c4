"""Bodies of /v1/files and /v1/batches."""

from __future__ import annotations

from typing import Literal

import pydantic

from afterglow.server.batches.lines import ENDPOINTS
from afterglow.server.schema.base import Metadata, StrictModel, supports_only
from afterglow.server.settings import KeepAlive

MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS = 3600, 30 * 24 * 3600  # as in OpenAI's API


class ExpiresAfter(StrictModel):
    """When a file is deleted."""

    anchor: Literal["created_at"]
    seconds: int = pydantic.Field(ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS)


class FileFields(StrictModel):
    """Fields of the form beside the file."""

    purpose: str = supports_only("batch", reason="files are the input of batches")
    expires_after: ExpiresAfter | None = None


class BatchRequest(StrictModel):
    """A file whose lines are requests to one endpoint."""

    input_file_id: str = pydantic.Field(description="File with one JSON object per line.")
    endpoint: str = pydantic.Field(description=f"Route of all lines: {', '.join(f'`{name}`' for name in ENDPOINTS)}.")
    completion_window: str = pydantic.Field(
        description="Time after which lines that have not run are given up: `24h`, or another duration such as `90m`."
    )
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = pydantic.Field(
        None, description="When the output files are deleted. Default: as in the settings (`file_retention`)."
    )

    @pydantic.field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if value not in ENDPOINTS:
            raise ValueError(f"must be one of {', '.join(ENDPOINTS)}")
        return value

    @property
    def window_seconds(self) -> float:
        """Length of the completion window. Raises `ValueError` if it is no duration."""
        seconds: float = pydantic.TypeAdapter(KeepAlive).validate_python(self.completion_window)
        return seconds
