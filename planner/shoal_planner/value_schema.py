"""JSON Schemas of what `strict.read` reads, made from the same dataclasses, so that they say what it does.

Owns types, ranges, what is required and that nothing else may stand there. What only the whole of a value can tell
(which fields go together) it leaves to the dataclasses.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal_planner.ranges import Range
from shoal_planner.strict import hints_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SCALARS: Mapping[object, str] = {int: "integer", float: "number", str: "string", bool: "boolean"}
# What was measured may have come out as no number, which JSON has as text alone.
_ANY_FLOAT = {"type": ["number", "string"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaper:
    """`words` are descriptions by the path of a field, `ranges` limits by the dataclass and the name of a field, and
    `shapes` the schemas of fields whose types say less than what may stand there."""

    words: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[type[Any], Mapping[str, Range]] = field(default_factory=dict)
    shapes: Mapping[tuple[type[Any], str], Mapping[str, Any]] = field(default_factory=dict)

    def of(self, cls: type[Any], path: str = "") -> dict[str, Any]:
        """Of a mapping of the fields of this dataclass, as plain JSON values."""
        properties, required = {}, []
        for each in dataclasses.fields(cls):
            at = f"{path}.{each.name}" if path else each.name
            properties[each.name] = self._field(cls, each, at)
            if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
                required.append(each.name)
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _field(self, cls: type[Any], each: dataclasses.Field[Any], at: str) -> dict[str, Any]:
        shape = self.shapes.get((cls, each.name))
        if shape is not None:
            made = dict(shape)
        elif "any_float" in each.metadata:
            made = dict(_ANY_FLOAT)
        else:
            made = self._of(hints_of(cls)[each.name], at)  # type: ignore[arg-type]
        made |= _range(self.ranges.get(cls, {}).get(each.name), made)
        if at in self.words:
            made["description"] = self.words[at]
        if _is_plain(each.default):
            made["default"] = each.default
        return made

    def _of(self, hint: Any, path: str) -> dict[str, Any]:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            return _union([self._of(each, path) for each in arguments])
        if hint is type(None):
            return {"type": "null"}
        if hint is Any:
            return {}
        if origin is typing.Literal:
            return {"enum": list(arguments)}
        if origin is tuple:
            return self._list(arguments, path)
        if origin is dict:
            return {"type": "object", "additionalProperties": self._of(arguments[1], path)}
        if dataclasses.is_dataclass(hint):
            return self.of(typing.cast(type[Any], hint), path)
        return {"type": _SCALARS[hint]}

    def _list(self, arguments: tuple[Any, ...], path: str) -> dict[str, Any]:
        if arguments[-1] is Ellipsis:
            return {"type": "array", "items": self._of(arguments[0], path)}
        items = [self._of(each, path) for each in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _range(limits: Range | None, made: Mapping[str, Any]) -> dict[str, Any]:
    if limits is None or not {"integer", "number"} & set(_types(made)):
        return {}
    return {name: limit for name, limit in zip(("minimum", "maximum"), limits, strict=True) if math.isfinite(limit)}


def _types(made: Mapping[str, Any]) -> list[str]:
    kinds = made.get("type", [])
    return [kinds] if isinstance(kinds, str) else kinds


def _union(options: list[dict[str, Any]]) -> dict[str, Any]:
    """Several simple types as one list of types, which editors show better than alternatives."""
    if all(set(option) == {"type"} for option in options):
        return {"type": [option["type"] for option in options]}
    return {"anyOf": options}
