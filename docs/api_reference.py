"""Writes the API reference from what the control plane says of itself: python docs/api_reference.py

docs/api.md is for people; programs ask a server for /openapi.json. How routes go together is rest.md's; what is made
here says only what each takes and answers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal_service.app import create_app
from shoal_service.settings import Settings

FOLDER = Path(__file__).parent
_HEAD = """# API reference

Each route of the control plane, what it takes, and with which status it answers; made by `python
docs/api_reference.py` of what a server says at `/openapi.json`. How they go together, and what all have in common, is
in [rest.md](rest.md). Errors are `application/problem+json` ([refusals](rest.md#refusals)).
"""
_METHODS = ("get", "post", "put", "patch", "delete")


def described() -> dict[str, Any]:
    """The OpenAPI document of a server that is set up as it comes."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = create_app(Settings(data_dir=Path(folder))).openapi()
    return found


def written(document: Mapping[str, Any]) -> str:
    """docs/api.md."""
    routes = sorted(
        (_group(path), path, method, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if method in _METHODS
    )
    lines, group = [_HEAD], ""
    for found, path, method, operation in routes:
        if found != group:
            group = found
            lines.append(f"## {group}\n")
        lines += _route(path, method, operation, document["components"])
    return "\n".join(lines).rstrip() + "\n"


def _group(path: str) -> str:
    return next((part for part in path.split("/") if part not in ("", "v1")), "/")


def _route(path: str, method: str, operation: Mapping[str, Any], components: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {method.upper()} {path}\n"
    said = " ".join((operation.get("description") or operation.get("summary", "")).split())
    yield f"{said}\n"
    fields = [_parameter(each) for each in operation.get("parameters", ())]
    body = operation.get("requestBody", {}).get("content", {})
    for kind, content in body.items():
        fields += _properties(content.get("schema", {}), components, kind)
    if fields:
        yield "| | field | type | |\n|---|---|---|---|"
        yield "\n".join(fields) + "\n"
    yield f"Answers: {', '.join(operation['responses'])}.\n"


def _parameter(parameter: Mapping[str, Any]) -> str:
    needed = "needed. " if parameter.get("required") and parameter["in"] != "path" else ""
    schema = parameter.get("schema", {})
    return _row(parameter["in"], parameter["name"], schema, needed, parameter.get("description", ""))


def _properties(schema: Mapping[str, Any], components: Mapping[str, Any], kind: str) -> list[str]:
    whole = _resolved(schema, components)
    needed = whole.get("required", ())
    if not whole.get("properties"):
        return [_row("body", kind, whole, "", whole.get("description", ""))]
    return [
        _row("body", name, each, "needed. " if name in needed else "", each.get("description", ""))
        for name, each in whole["properties"].items()
    ]


def _row(place: str, name: str, schema: Mapping[str, Any], needed: str, says: str) -> str:
    default = schema.get("default")
    told = f" Default: `{json.dumps(default)}`." if default is not None else ""
    return f"| {place} | `{name}` | {_cell(_type(schema))} | {_cell(needed + says + told)} |"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[several]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("format") or schema.get("type") or "any")


def _resolved(schema: Mapping[str, Any], components: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" in schema:
        found: Mapping[str, Any] = components["schemas"][schema["$ref"].rpartition("/")[2]]
        return found
    return schema


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    (FOLDER / "api.md").write_text(written(described()), encoding="utf-8")
