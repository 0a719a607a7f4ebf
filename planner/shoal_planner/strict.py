"""Reads a mapping (from JSON or YAML) into frozen dataclasses, strictly.

Owns: type checks, unknown keys (answered with the nearest known one), missing keys. Does not own what a value means:
that is the `__post_init__` of each dataclass, whose `InvalidField` gets the path of the enclosing object in front.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from shoal_planner.errors import InvalidField

T = TypeVar("T")


def read(cls: type[T], value: object, path: str = "") -> T:
    """An instance of the dataclass `cls` from a mapping. Raises InvalidField, naming the field and the value."""
    if not isinstance(value, Mapping):
        raise InvalidField(path or cls.__name__, value, "must be a mapping of fields to values")
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in value:
        if key not in known:
            raise InvalidField(_join(path, str(key)), value[key], _unknown(str(key), known))
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for name, field in known.items():
        if name in value:
            arguments[name] = _convert(hints[name], value[name], _join(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InvalidField(_join(path, name), None, "is required")
    try:
        return cls(**arguments)
    except InvalidField as error:
        raise InvalidField(_join(path, error.field), error.value, error.problem) from error


def _unknown(key: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return (
        f"is not a known field; did you mean {near[0]!r}?"
        if near
        else f"is not a known field; known: {', '.join(known)}"
    )


def _convert(hint: Any, value: object, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(arguments, value, path)
    if origin is typing.Literal:
        if value not in arguments or isinstance(value, bool) != isinstance(arguments[0], bool):
            raise InvalidField(path, value, f"must be one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        return _convert_tuple(arguments, value, path)
    if origin is dict:
        return _convert_mapping(arguments, value, path)
    if dataclasses.is_dataclass(hint):
        return read(typing.cast(type[Any], hint), value, path)
    return _convert_scalar(hint, value, path)


def _convert_union(options: tuple[Any, ...], value: object, path: str) -> Any:
    if value is None and type(None) in options:
        return None
    rest = [option for option in options if option is not type(None)]
    for option in rest[:-1]:
        try:
            return _convert(option, value, path)
        except InvalidField:
            continue
    return _convert(rest[-1], value, path)


def _convert_tuple(items: tuple[Any, ...], value: object, path: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidField(path, value, "must be a list")
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_convert(items[0], item, f"{path}[{index}]") for index, item in enumerate(value))
    if len(value) != len(items):
        raise InvalidField(path, value, f"must have {len(items)} entries")
    return tuple(
        _convert(hint, item, f"{path}[{index}]") for index, (hint, item) in enumerate(zip(items, value, strict=True))
    )


def _convert_mapping(items: tuple[Any, ...], value: object, path: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise InvalidField(path, value, "must be a mapping")
    return {
        _convert(items[0], key, path): _convert(items[1], item, _join(path, str(key))) for key, item in value.items()
    }


def _convert_scalar(hint: Any, value: object, path: str) -> Any:
    if hint is Any:
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 3e-4 as a string
        try:
            return float(value)
        except ValueError:
            pass
    if hint is str and isinstance(value, str):
        return value
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    raise InvalidField(path, value, f"must be {names.get(hint, hint)}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
