"""Reading mappings into dataclasses: every kind of field, and what a wrong value is answered with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from shoal_planner.errors import InvalidField
from shoal_planner.strict import ANY_FLOAT, read


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidField("size", self.size, "must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    mode: Literal["slow", "fast"] = "slow"
    level: Literal[0, 1] = 0
    ratio: float = 0.5
    on: bool = False
    limit: int | None = None
    copies: int | Literal["auto"] = "auto"
    pair: tuple[float, float] = (0.0, 1.0)
    inner: Inner = Inner()
    several: tuple[Inner, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    named: dict[str, Inner] = field(default_factory=dict)
    anything: Any = None


def test_every_kind_of_field_is_read() -> None:
    found = read(
        Outer,
        {
            "name": "n",
            "mode": "fast",
            "level": 1,
            "ratio": "3e-4",
            "on": True,
            "limit": 4,
            "copies": 2,
            "pair": [1, 2.5],
            "inner": {"size": 3},
            "several": [{"size": 1}, {}],
            "counts": {"own": 1},
            "named": {"a": {"size": 2}},
            "anything": [1, {"x": None}],
        },
    )
    assert found == Outer(
        name="n",
        mode="fast",
        level=1,
        ratio=3e-4,
        on=True,
        limit=4,
        copies=2,
        pair=(1.0, 2.5),
        inner=Inner(size=3),
        several=(Inner(size=1), Inner()),
        counts={"own": 1},
        named={"a": Inner(size=2)},
        anything=[1, {"x": None}],
    )


@pytest.mark.parametrize(
    ("value", "path", "problem"),
    [
        ([], "Outer", "must be a mapping of fields to values"),
        ({}, "name", "is required"),
        ({"name": 1}, "name", "must be text"),
        ({"name": "n", "nmae": 1}, "nmae", "did you mean 'name'?"),
        ({"name": "n", "s": 1}, "s", "did you mean 'several'?"),
        ({"name": "n", "l": 1}, "l", "known: name, mode"),
        ({"name": "n", "zzz": 1}, "zzz", "known: name, mode"),
        ({"name": "n", "mode": "quick"}, "mode", "must be one of slow, fast"),
        ({"name": "n", "mode": None}, "mode", "must be one of slow, fast"),
        ({"name": "n", "level": True}, "level", "must be one of 0, 1"),
        ({"name": "n", "ratio": "much"}, "ratio", "must be a number"),
        ({"name": "n", "ratio": True}, "ratio", "must be a number"),
        ({"name": "n", "on": 1}, "on", "must be true or false"),
        ({"name": "n", "limit": 1.5}, "limit", "must be a whole number"),
        ({"name": "n", "limit": True}, "limit", "must be a whole number"),
        ({"name": "n", "copies": "some"}, "copies", "must be a whole number or auto"),
        ({"name": "n", "copies": True}, "copies", "must be a whole number or auto"),
        ({"name": "n", "copies": 2**63}, "copies", "must fit into 64 bits"),
        ({"name": "n", "limit": -(2**63)}, "limit", "must fit into 64 bits"),
        ({"name": "n", "ratio": float("nan")}, "ratio", "must be a finite number"),
        ({"name": "n", "ratio": "-.inf"}, "ratio", "must be a number"),
        ({"name": "n", "ratio": "inf"}, "ratio", "must be a finite number"),
        ({"name": "n", "ratio": "0.5"}, "ratio", "must be a number, and is text"),
        ({"name": "n", "ratio": 10**400}, "ratio", "is too large for a number"),
        ({"name": "n", "pair": [1, float("inf")]}, "pair[1]", "must be a finite number"),
        ({"name": "n", "pair": [1]}, "pair", "must have 2 entries"),
        ({"name": "n", "pair": "ab"}, "pair", "must be a list"),
        ({"name": "n", "pair": [1, "x"]}, "pair[1]", "must be a number"),
        ({"name": "n", "inner": {"size": 0}}, "inner.size", "must be at least 1"),
        ({"name": "n", "inner": 3}, "inner", "must be a mapping of fields to values"),
        ({"name": "n", "several": [{}, {"sise": 1}]}, "several[1].sise", "did you mean 'size'?"),
        ({"name": "n", "several": {"size": 1}}, "several", "must be a list"),
        ({"name": "n", "counts": [1]}, "counts", "must be a mapping"),
        ({"name": "n", "counts": {"own": "x"}}, "counts.own", "must be a whole number"),
        ({"name": "n", "counts": {1: 1}}, "counts", "must be text"),
        ({"name": "n", "named": {"a": {"size": 0}}}, "named.a.size", "must be at least 1"),
    ],
)
def test_a_wrong_value_is_answered_with_its_path_and_problem(value: object, path: str, problem: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read(Outer, value)
    assert caught.value.field == path
    assert problem in caught.value.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    loss: float = field(metadata=ANY_FLOAT)


def test_what_was_measured_may_have_come_out_as_no_number() -> None:
    for value in (float("nan"), "nan", float("inf")):
        assert not math.isfinite(read(Measured, {"loss": value}).loss)
    with pytest.raises(InvalidField, match="loss = 'x': must be a number"):
        read(Measured, {"loss": "x"})
