"""Queries and bodies of the routes that show the prefix tree, the events and the requests."""

from __future__ import annotations

import pydantic

from afterglow.engine.inspect.tree import MAX_TREE_NODES
from afterglow.server.history import MAX_REQUESTS
from afterglow.server.schema.base import NameField, OptionalModel, StrictModel


class QueryModel(pydantic.BaseModel):
    """Base class of queries. Their values are text, which is converted; unknown names are rejected."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class TreeQuery(QueryModel):
    model: OptionalModel = None
    max_nodes: int = pydantic.Field(
        MAX_TREE_NODES, ge=1, le=100_000, description="Beyond it, the least recently used branches are folded."
    )
    since: int | None = pydantic.Field(None, description="Version of an earlier tree: status 304 if nothing changed.")


class NodeQuery(QueryModel):
    model: OptionalModel = None
    id: NameField = pydantic.Field(description="`id` of a node of `GET /tree`.")


class EventsQuery(QueryModel):
    after: int | None = pydantic.Field(
        None, ge=0, description="Number of the last event that the client has; 0: all. Unset: new events only."
    )


class RequestsQuery(QueryModel):
    limit: int = pydantic.Field(MAX_REQUESTS, ge=1, le=MAX_REQUESTS)


class NodeRequest(StrictModel):
    """A node of the prefix tree."""

    model: OptionalModel = None
    id: NameField = pydantic.Field(description="`id` of a node of `GET /tree`.")


class NodeResponse(StrictModel):
    model: str
    id: str
    tokens: int = pydantic.Field(description="Length of the prefix up to the end of the node.")
    pinned: bool


class ForgetResponse(StrictModel):
    model: str
    id: str
    sequences: int = pydantic.Field(description="Idle sequences that were shortened or cleared.")
    blocks: int
    checkpoints: int
    pins: int
    busy_sequences: int = pydantic.Field(description="Sequences of running requests, which stay.")


class PromptResponse(StrictModel):
    model: str
    id: str
    tokens: int
    text: str = pydantic.Field(description="Text of all tokens up to the end of the node, with control tokens.")
