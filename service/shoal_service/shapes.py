"""What answers of the API look like, for its description and for the type checker: what all shapes are made of. The
functions that make answers return these; nothing checks them again when they go out."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field, WithJsonSchema

# TypedDict of `typing` tells pydantic too little before Python 3.12.
from typing_extensions import TypedDict

from shoal_recovery.journal import JobState

T = TypeVar("T")
NAMED = "x-document"  # pydantic knows references to its own models alone: openapi.py makes one of this


def document(name: str) -> WithJsonSchema:
    """As the component of this name says (`documents`)."""
    return WithJsonSchema({NAMED: name})


def one_of(*values: str) -> WithJsonSchema:
    return WithJsonSchema({"enum": list(values)})


At = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]
State = Annotated[str, one_of(*(state.value for state in JobState))]
ETag = Annotated[str, Field(description="For If-Match.")]
JobSpec = Annotated[dict[str, Any], document("JobSpec")]
Plan = Annotated[dict[str, Any], document("Plan")]
Profile = Annotated[dict[str, Any], document("Profile")]


class Page(TypedDict, Generic[T]):
    """`next_cursor` is null on the last page."""

    items: list[T]
    next_cursor: str | None
