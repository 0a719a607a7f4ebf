"""Reads a mapping (from JSON or YAML) into frozen dataclasses, strictly.

Owns: type checks, numbers that are none or do not fit, unknown keys (answered with the nearest known one), missing
keys. Does not own what a value means: that is the `__post_init__` of each dataclass, whose `InvalidField` gets the path
of the enclosing object in front.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from shoal_planner.errors import InvalidField, NotADocument, show

T = TypeVar("T")
# Metadata of a field that tells of something measured, which may have come out as no number.
ANY_FLOAT: Mapping[str, bool] = types.MappingProxyType({"any_float": True})
_LARGEST_INT = 2**63 - 1
# What YAML 1.1 takes for text although a number was meant, as in 3e-4. No other text is a number.
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_NAMES: Mapping[object, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def read(cls: type[T], value: object, path: str = "") -> T:
    """An instance of the dataclass `cls` from a mapping. Raises InvalidField, naming the field and the value."""
    if not isinstance(value, Mapping):
        raise InvalidField(path or cls.__name__, value, "must be a mapping of fields to values")
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in value:
        if key not in known:
            raise InvalidField(_join(path, str(key)), value[key], _unknown(str(key), known))
    hints = hints_of(cls)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for name, field in known.items():
        if name in value:
            given, at = value[name], _join(path, name)
            loose = hints[name] is float and "any_float" in field.metadata
            arguments[name] = _float(given, at) if loose else _convert(hints[name], given, at)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InvalidField(_join(path, name), None, "is required")
    try:
        return cls(**arguments)
    except InvalidField as error:
        raise InvalidField(_join(path, error.field), error.value, error.problem) from error


@functools.cache
def hints_of(cls: type[Any]) -> Mapping[str, Any]:
    """The type of each field of a dataclass. They stand in its source as text, and to evaluate that costs more than to
    check a value."""
    return types.MappingProxyType(typing.get_type_hints(cls))


def check_document(value: object, name: str) -> Mapping[Any, Any]:
    """The value if it is a mapping. Raises NotADocument, which calls it by this name."""
    if value is None:
        raise NotADocument(name, value, "is empty: it must be a mapping of fields to values")
    if not isinstance(value, Mapping):
        raise NotADocument(name, value, f"is {_kind(value)}: it must be a mapping of fields to values")
    return value


def check_known(value: Mapping[Any, Any], known: Sequence[str]) -> None:
    """Raises InvalidField for the first key that is none of these."""
    for key in value:
        if key not in known:
            raise InvalidField(str(key), value[key], _unknown(str(key), dict.fromkeys(known)))


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list | tuple) else f"no more than {show(value)}"


def _unknown(key: str, known: Mapping[str, object]) -> str:
    begun = [name for name in known if name.startswith(key)]  # as `r` for rank: too short to be alike
    near = difflib.get_close_matches(key, known, n=1) or (begun if len(begun) == 1 else [])
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
    for option in rest:
        try:
            return _convert(option, value, path)
        except InvalidField:
            if len(rest) == 1 or _is_kind(option, value):
                raise  # of the right kind, so what is wrong with it says more than what else there might be
    raise InvalidField(path, value, f"must be {' or '.join(map(_name, rest))}")


def _is_kind(hint: Any, value: object) -> bool:
    return hint in (int, float) and isinstance(value, int) and not isinstance(value, bool)


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    return _NAMES.get(hint, str(hint))


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
        if abs(value) > _LARGEST_INT:
            raise InvalidField(path, value, "must fit into 64 bits")
        return value
    if hint is float:
        return number(value, path)
    if hint is str and isinstance(value, str):
        return value
    raise InvalidField(path, value, f"must be {_NAMES.get(hint, hint)}")


def number(value: object, path: str) -> float:
    """A finite number. Raises InvalidField."""
    found = _float(value, path)
    if not math.isfinite(found):
        raise InvalidField(path, value, "must be a finite number")
    if isinstance(value, str) and not _EXPONENT.fullmatch(value):
        raise InvalidField(path, value, "must be a number, and is text")
    return found


def _float(value: object, path: str) -> float:
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        raise InvalidField(path, value, "must be a number")
    try:
        return float(value)
    except ValueError as error:
        raise InvalidField(path, value, "must be a number") from error
    except OverflowError as error:
        raise InvalidField(path, value, "is too large for a number") from error


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
