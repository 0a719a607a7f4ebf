"""Messages in the handbook's troubleshooting are those of the program, and each chapter of deployment is there."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^`([^`]+)`\n: ", TEXT, flags=re.MULTILINE)
_HOLE = "\0"


def literals(node: ast.AST) -> Iterator[str]:
    """Texts of a source, with holes where values go; neighbours that Python joins are joined."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(each.value) if isinstance(each, ast.Constant) else _HOLE for each in node.values)
    for child in ast.iter_child_nodes(node):
        yield from literals(child)


@functools.cache
def sources() -> tuple[str, ...]:
    found = [
        text
        for folder in ("planner", "recovery", "service", "workers")
        for path in (ROOT / folder).glob("*/*.py")
        for text in literals(ast.parse(path.read_text(encoding="utf-8")))
    ]
    return (*found, *(path.read_text(encoding="utf-8") for path in (ROOT / "deploy").glob("*.sh")))


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_is_one_of_the_program(message: str) -> None:
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip(" .:,")]
    pattern = re.compile(r".{0,400}?".join(parts), flags=re.DOTALL)
    assert any(pattern.search(text) for text in sources())


def test_there_are_enough_of_them() -> None:
    assert len(MESSAGES) > 25
