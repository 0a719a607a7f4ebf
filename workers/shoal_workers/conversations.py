"""The shapes in which people keep chats, made one: messages as transformers hands them to a template.

Owns what a chat may be. How it looks as text is `chat`'s affair.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shoal_planner.errors import show

# Who speaks, in data of the ShareGPT kind (`from`, `value`).
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
# What is said for these in data of other kinds (`role`), whatever its letters; templates know but the four.
_SAME_ROLES = {name: role for name, role in _ROLES.items() if role != "tool" and name != "function_call"}
_SAME_ROLES |= {"bot": "assistant", "ai": "assistant", "tool": "tool"}
# Which some templates know besides.
_OTHER_ROLES = ("developer", "function", "ipython", "observation", "tool_response", "environment", "documents")
THOUGHT = ("reasoning_content", "thinking", "reasoning")  # what is thought before an answer; the first is usual
_INSTEAD = ("tool_calls", "function_call", *THOUGHT)  # of content
Message = Mapping[str, Any]


class Conversation(NamedTuple):
    messages: list[Message]
    tools: list[Mapping[str, Any]] | None


def is_empty_chat(messages: object) -> bool:
    """Whether there is no message, which may be said in JSON, too."""
    if isinstance(messages, str):
        return messages.strip() in ("", "null", "[]")
    return messages is None or (isinstance(messages, Sequence) and not messages)


def conversation(messages: object, tools: object, *, sparse: bool) -> Conversation:
    """`messages` and `tools` may be JSON as text. In `sparse` data, as tables are, all that is null is not there, at
    any depth: each row of a table has the fields of every other. Raises ValueError, which says what is wrong."""
    messages, tools = _read("messages", messages), _read("tools", tools)
    if sparse:
        messages, tools = _without_nulls(messages), _without_nulls(tools)
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError("is no list of messages")
    found = [_message(index, message) for index, message in enumerate(messages)]
    roles = [message["role"] for message in found]
    strange = next((role for role in roles if role not in _SAME_ROLES and role not in _OTHER_ROLES), None)
    if strange is not None and "assistant" not in roles:
        raise ValueError(f"has no answer to learn: its messages are of {show(strange)}, and none of 'assistant'")
    return Conversation(found, _tools(tools))


def _read(name: str, value: object) -> object:
    if not isinstance(value, str) or not value.strip():
        return None if name == "tools" and isinstance(value, str) else value
    try:
        found: object = json.loads(value)
    except ValueError as error:
        if name == "messages":
            raise ValueError("is no list of messages, nor JSON of one") from error
        raise ValueError(f"has {name} that are no JSON: {show(value)} ({error})") from error
    return found


def _tools(tools: object) -> list[Mapping[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"has tools that are no list: {show(tools)}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ValueError(f"has a tool {index} that is no mapping: {show(tool)}")
    return list(tools)


def _message(index: int, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"has as message {index} no mapping of role and content")
    if "role" not in message and "from" in message:
        message = _shared(index, message)
    # What is null is not there: many templates would show it as "None".
    found = {key: value for key, value in message.items() if value is not None}
    if not isinstance(found.get("role"), str):
        raise ValueError(f"has a message {index} whose role is no text: {show(message.get('role'))}")
    found["role"] = _SAME_ROLES.get(found["role"].strip().lower(), found["role"])
    if found["role"] == "assistant" and found.get("weight", 1) not in (0, 1):
        raise ValueError(f"has a message {index} whose weight is neither 0 nor 1: {show(found['weight'])}")
    _check_content(index, found)
    thought = next((found[name] for name in THOUGHT if name in found), None)
    return found if thought is None else {"thinking": thought, **found, "reasoning_content": thought}


def _check_content(index: int, message: Message) -> None:
    content = message.get("content")
    if isinstance(content, str | Mapping) or (content is None and any(message.get(name) for name in _INSTEAD)):
        return
    if not isinstance(content, Sequence):
        raise ValueError(f"has a message {index} whose content is no text: {show(content)}")
    for part in content:
        if not isinstance(part, str | Mapping):
            raise ValueError(f"has a message {index} with a part that is neither text nor a mapping: {show(part)}")


def _shared(index: int, message: Message) -> Message:
    speaker, value = message["from"], message.get("value")
    if speaker not in _ROLES:
        raise ValueError(f"has a message {index} from {show(speaker)}, which is none of {', '.join(_ROLES)}")
    rest = {key: one for key, one in message.items() if key not in ("from", "value")}
    if speaker != "function_call":
        return {**rest, "role": _ROLES[speaker], "content": value}
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"has a message {index} whose function_call is no JSON: {show(value)}") from error
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError(f"has a message {index} whose function_call has no name: {show(value)}")
    return {**rest, "role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value
