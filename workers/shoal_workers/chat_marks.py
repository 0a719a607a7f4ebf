"""Marks in place of what stands in messages, to see where a template puts it.

A mark is a word of nine letters and digits, so it comes through whatever templates do to text: they trim and split it,
write it as JSON, or want it to be as long as the id of a call. Owns what is marked, and which texts a template may make
of one. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shoal_workers.conversations import THOUGHT, Message

_WORD = "q8Zxj"  # in no text that people write
_FOUND = re.compile(_WORD + r"(\d{4})")
_MOST = 10_000
_THINKS = re.compile("(</?think>)")  # templates split answers there


class Mark(NamedTuple):
    message: int
    text: str  # what it stands for


class Marked(NamedTuple):
    """Messages with marks in place of their texts; `marks` by number."""

    messages: list[Message]
    marks: list[Mark]


def marked(messages: Sequence[Message], which: Collection[int]) -> Marked | None:
    """With marks in these messages; in their calls for all but names only if these are all messages, so that chats
    with other arguments and ids are of one form. None: there are too many."""
    marks: list[Mark] = []
    ids: dict[str, str] | None = {} if len(which) == len(messages) else None
    found = [_Marker(index, marks, ids).message(one) if index in which else one for index, one in enumerate(messages)]
    return Marked(found, marks) if len(marks) <= _MOST else None


def may_mark(text: str) -> bool:
    """Whether no mark stands in it already."""
    return _WORD not in text


def split(text: str) -> tuple[list[str], list[int]]:
    """A text with marks: what stands around them (one more than these), and their numbers."""
    parts = _FOUND.split(text)
    return parts[::2], [int(number) for number in parts[1::2]]


def forms(text: str) -> Iterator[str]:
    """What templates make of a text, most usual first."""
    yield text
    for what in (None, "\n"):
        yield text.strip(what)
        yield text.lstrip(what)
        yield text.rstrip(what)
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]


class _Marker:
    """Of one message. `ids` are those of calls with their marks, where these are marked."""

    def __init__(self, index: int, marks: list[Mark], ids: dict[str, str] | None) -> None:
        self._index = index
        self._marks = marks
        self._ids = ids
        self._thoughts: dict[str, str] = {}

    def message(self, message: Message) -> Message:
        found = dict(message)
        content, calls = found.get("content"), found.get("tool_calls")
        for name in THOUGHT:  # of one thought under several names, a template shows any
            if isinstance(thought := found.get(name), str) and thought.strip():
                if thought not in self._thoughts:
                    self._thoughts[thought] = self._mark(thought)
                found[name] = self._thoughts[thought]
        if isinstance(content, str):
            found["content"] = self._text(content, last=not calls) if content.strip() or not calls else content
        elif isinstance(content, Sequence):
            found["content"] = [self._part(part) for part in content]
        if isinstance(calls, Sequence) and not isinstance(calls, str):
            found["tool_calls"] = [self._call(call) for call in calls]
        if self._ids is not None and isinstance(answered := found.get("tool_call_id"), str):
            found["tool_call_id"] = self._id(self._ids, answered)
        if isinstance(call := found.get("function_call"), Mapping):
            found["function_call"] = self._call(call)
        return found

    def _mark(self, text: str) -> str:
        self._marks.append(Mark(self._index, text))
        return f"{_WORD}{len(self._marks) - 1:04d}"

    def _text(self, text: str, *, last: bool = False) -> str:
        """What is thought in it is marked apart; what stands behind that even if it is nothing, where it is the `last`
        of an answer."""
        parts = _THINKS.split(text)
        spoken = len(parts) - 1 if last or not any(part.strip() for part in parts[::2]) else None
        return "".join(
            part if index % 2 or not (part.strip() or index == spoken) else self._mark(part)
            for index, part in enumerate(parts)
        )

    def _part(self, part: Any) -> Any:
        if isinstance(part, str):
            return self._text(part)
        text = part.get("text") if isinstance(part, Mapping) else None
        return {**part, "text": self._text(text)} if isinstance(text, str) else part

    def _call(self, call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        found = dict(call)
        if isinstance(function := call.get("function"), Mapping):
            found["function"] = self._call(function)
        elif isinstance(name := call.get("name"), str):
            found["name"] = self._mark(name)
        if self._ids is not None:
            if isinstance(own := call.get("id"), str):
                found["id"] = self._id(self._ids, own)
            if "arguments" in call:
                found["arguments"] = self._value(call["arguments"])
        return found

    def _value(self, value: Any) -> Any:
        """The texts of an argument; what else there is stays, and so do empty ones."""
        if isinstance(value, Mapping):
            return {key: self._value(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._value(one) for one in value]
        return self._mark(value) if isinstance(value, str) and value.strip() else value

    def _id(self, ids: dict[str, str], own: str) -> str:
        """The same mark wherever it stands: templates may look for the call that was answered."""
        if own not in ids:
            ids[own] = self._mark(own)
        return ids[own]
