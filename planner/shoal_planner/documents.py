"""Reads a JOB, CLUSTER or PLAN document (YAML; JSON is a part of it) into plain values.

Owns where a mistake is reported, and how much a document may make of little text; not what the values mean.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml
from yaml.cyaml import CSafeLoader

_MOST_LEVELS = 100
_MOST_DIGITS = 100  # beyond any number that means something; much longer ones take long to read, and to write again


class MalformedDocument(ValueError):
    """`source` is the file or body; `line` counts from 1; `problem` completes the sentence."""

    def __init__(self, source: str, line: int, problem: str) -> None:
        super().__init__(source, line, problem)
        self.source = source
        self.line = line
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}: {self.problem}"


class _Loader(CSafeLoader):
    """Safe, and refuses a key that stands twice in one mapping, of which YAML readers silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} stands here twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _MOST_DIGITS:
            problem = f"a whole number has {len(node.value)} characters; at most {_MOST_DIGITS} are read"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def read_document(text: str, source: str, *, most_nodes: int | None = None) -> Any:
    """The one document in `text`. An alias stands for a copy of what it names; with `most_nodes`, all copies together
    have at most so many values and keys, and 32 characters for each of these. Raises MalformedDocument."""
    try:
        _check_growth(text, source, most_nodes)
        return yaml.load(text, _Loader)
    except MalformedDocument:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise MalformedDocument(source, mark.line + 1 if mark else 1, f"is not valid YAML: {said}") from error
    except yaml.reader.ReaderError as error:
        line = text.encode(errors="replace").count(b"\n", 0, error.position) + 1
        raise MalformedDocument(source, line, f"is not valid YAML: {error.reason}") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedDocument(source, 1, f"is not valid YAML: {error}") from error


class _Growth:
    """What aliases make of a document, counted while it is parsed and before anything is made of it."""

    def __init__(self) -> None:
        self.nodes = 0
        self.characters = 0
        self._open: list[tuple[str | None, int, int]] = []
        self._named: dict[str, tuple[int, int]] = {}

    @property
    def levels(self) -> int:
        return len(self._open)

    def add(self, event: yaml.Event) -> str | None:
        """What is wrong with it, if that is an alias inside of what it names."""
        match event:
            case yaml.AliasEvent():
                if any(name == event.anchor for name, _, _ in self._open):
                    return f"the alias *{event.anchor} stands inside of what it names"
                nodes, characters = self._named.get(event.anchor or "", (1, 0))  # an unknown one is refused later
                self.nodes += nodes
                self.characters += characters
            case yaml.CollectionStartEvent():
                self._open.append((event.anchor, self.nodes, self.characters))
                self.nodes += 1
            case yaml.CollectionEndEvent():
                self._name(*self._open.pop())
            case yaml.ScalarEvent():
                before = self.nodes, self.characters
                self.nodes += 1
                self.characters += len(event.value)
                self._name(event.anchor, *before)
        return None

    def _name(self, anchor: str | None, nodes: int, characters: int) -> None:
        if anchor is not None:
            self._named[anchor] = self.nodes - nodes, self.characters - characters


def _check_growth(text: str, source: str, most_nodes: int | None) -> None:
    """Raises MalformedDocument for what would be endless, too deep or too large, and MarkedYAMLError."""
    growth, loader = _Growth(), _Loader(text)
    try:
        while (event := loader.get_event()) is not None:
            problem = growth.add(event) or _too_much(growth, most_nodes)
            if problem is not None:
                mark = event.start_mark
                raise MalformedDocument(source, mark.line + 1 if mark else 1, problem)
    finally:
        loader.dispose()


def _too_much(growth: _Growth, most_nodes: int | None) -> str | None:
    if growth.levels > _MOST_LEVELS:
        return f"is nested too deeply: at most {_MOST_LEVELS} levels are read"
    if most_nodes is None:
        return None
    if growth.nodes > most_nodes:
        return f"has more than {most_nodes} values and keys up to here, with each alias as what it names"
    if growth.characters > 32 * most_nodes:
        return f"has more than {32 * most_nodes} characters up to here, with each alias as what it names"
    return None
