"""Reads a JOB, CLUSTER or PLAN document (YAML; JSON is a part of it) into plain values.

Owns where a mistake is reported; not what the values mean.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class MalformedDocument(ValueError):
    """`source` is the file or body; `line` counts from 1; `problem` completes the sentence."""

    def __init__(self, source: str, line: int, problem: str) -> None:
        super().__init__(source, line, problem)
        self.source = source
        self.line = line
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}: {self.problem}"


class _Loader(yaml.SafeLoader):
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


def read_document(text: str, source: str) -> Any:
    """The one document in `text`. Raises MalformedDocument."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise MalformedDocument(source, mark.line + 1 if mark else 1, f"is not valid YAML: {said}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise MalformedDocument(source, line, f"is not valid YAML: {error.reason}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise MalformedDocument(source, 1, f"is not valid YAML: {error}") from error
