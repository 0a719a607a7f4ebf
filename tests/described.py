"""The description of the API as a judge: exact answers, and what in it says nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator

Document = dict[str, Any]


def closed(document: Document) -> Document:
    """Clients have to live with fields that a later version adds; a test does not: nothing that is not described."""
    found = copy.deepcopy(document)
    for schema in schemas(found):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return found


def schemas(value: Any) -> Iterator[dict[str, Any]]:
    """All schemas in a part of the document, the inner ones too."""
    if isinstance(value, list):
        for each in value:
            yield from schemas(each)
    elif isinstance(value, dict):
        yield value
        for key, each in value.items():
            if key in ("properties", "schemas"):
                for inner in each.values():
                    yield from schemas(inner)
            elif key not in ("default", "const", "enum", "examples", "required"):
                yield from schemas(each)


def validator(document: Document, method: str, path: str, status: int) -> Draft202012Validator:
    """Of the JSON that this operation answers with."""
    answer = document["paths"][path][method]["responses"][str(status)]
    schema = answer["content"]["application/json"]["schema"]
    return Draft202012Validator({**schema, "components": document["components"]})


def bodies(document: Document) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is sent and answered as JSON, by operation and status."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            named = f"{method.upper()} {path}"
            for kind, each in operation.get("requestBody", {}).get("content", {}).items():
                yield f"{named} {kind}", each.get("schema", {})
            for status, answer in operation["responses"].items():
                for kind, each in answer.get("content", {}).items():
                    if "json" in kind:
                        yield f"{named} {status}", each.get("schema", {})


def free(document: Document, schema: dict[str, Any], at: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Where a value may be anything, or an object of anything."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in seen:
            yield from free(document, document["components"]["schemas"][name], name, seen | {name})
        return
    options = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key, ())]
    for option in options:
        if "properties" not in schema:  # else options say which of them go together
            yield from free(document, option, at, seen)
    more = schema.get("additionalProperties")
    for name, each in schema.get("properties", {}).items():
        yield from free(document, each, f"{at}.{name}", seen)
    if isinstance(more, dict):
        yield from free(document, more, f"{at}.*", seen)
    if isinstance(schema.get("items"), dict):
        yield from free(document, schema["items"], f"{at}[]", seen)
    said = {"type", "enum", "const", "properties", "anyOf", "oneOf", "allOf"} & schema.keys()
    is_object = schema.get("type") == "object" and "properties" not in schema and not isinstance(more, dict)
    if (not said or is_object) and not options:
        yield at
