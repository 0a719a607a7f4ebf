"""From a conversation to text of which only the assistant's answers are to be learnt.

A template says how a chat looks as text: `chatml`, or what a tokenizer brings along. Some say themselves what is to be
learnt; of others the answers are looked for (`answers`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from shoal_planner.errors import InvalidField, show
from shoal_workers.answers import Forms, Located, Span
from shoal_workers.conversations import Message, conversation
from shoal_workers.template_environment import Compiled, compiled
from shoal_workers.tokenizing import Tokenizer, hash_of, token_text

# Nothing of a message is left out: of what it cannot show, it says so. Tools and calls stand there as the models do it
# that have chatml themselves.
CHATML = """\
{%- macro text(content) %}
{%- if content is string %}{{ content }}
{%- elif content is mapping %}{{ content | tojson }}
{%- else %}
{%- for part in content or [] %}
{%- if part is string %}{{ part }}
{%- elif part.text is string %}{{ part.text }}
{%- else %}{{ raise_exception('chatml shows text alone, not ' ~ part) }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages and messages[0].role == 'system' %}{{- text(messages[0].content) ~ '\n\n' }}{%- endif %}
{{- '# Tools\n\n<tools>' }}
{%- for tool in tools %}{{- '\n' ~ (tool | tojson) }}{%- endfor %}
{{- '\n</tools>\n\nA call of a tool is written as\n<tool_call>\n' }}
{{- '{"name": NAME, "arguments": {NAME: VALUE}}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' ~ message.role ~ '\n' }}
{%- if message.function_call %}{{- raise_exception('chatml has no function_call: use tool_calls') }}{%- endif %}
{%- if message.reasoning_content %}{{- '<think>\n' ~ message.reasoning_content ~ '\n</think>\n\n' }}{%- endif %}
{{- text(message.content) }}
{%- for call in message.tool_calls or [] %}
{%- set called = call.function or call %}
{%- set arguments = called.arguments %}
{%- if message.content or not loop.first %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": ' ~ (called.name | tojson) ~ ', "arguments": ' }}
{{- arguments if arguments is string else (arguments or {}) | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
_LEARNT = "assistant"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBE = "a text to look for"
_NOWHERE = "has answers, none of which can be told from what the template shows around it"
_UNTOLD = "has answers, none of which the template shows within {% generation %}"
_Text = TypeVar("_Text")


class Shown(NamedTuple):
    """A chat as text. `answers` are the characters [begin, end) that are to be learnt, in order; `num_missing` answers
    are not found in it. `ends` says that what ends the document has to end the last answer, as nothing else does."""

    text: str
    answers: list[Span]
    num_missing: int
    ends: bool


class ChatTemplate:
    """`with_tools` is the template for chats with tools, where there is one of its own. `sparse` says that what is null
    in the data is not there. `digest` differs wherever the text of a chat may."""

    def __init__(
        self, source: str, special: Mapping[str, str], *, with_tools: str | None = None, sparse: bool = False
    ) -> None:
        """Raises ValueError where the template cannot be read."""
        from jinja2 import TemplateError

        self._error = TemplateError
        try:
            self._template = compiled(source)
            self._with_tools = self._template if with_tools is None else compiled(with_tools)
        except TemplateError as error:
            raise ValueError(f"its chat template cannot be read: {error}") from error
        self._special = dict(special)
        self._sparse = sparse
        self._forms = Forms()
        self._takes_parts = self._shows_parts()
        self.digest = hash_of(f"{source} {with_tools} {sparse} {sorted(self._special.items())}")

    def show(self, messages: object, tools: object = None) -> Shown:
        """Raises ValueError, which says what is wrong with them."""
        chat = conversation(messages, tools, sparse=self._sparse)
        checked = chat.messages if self._takes_parts else [_joined(*one) for one in enumerate(chat.messages)]
        answers = [
            index for index, message in enumerate(checked) if message["role"] == _LEARNT and message.get("weight", 1)
        ]
        template = self._template if chat.tools is None else self._with_tools
        if template.tells:
            text, told = self._asked(template.render_told, checked, chat.tools)
            found = Located(self._wanted(template, chat.tools, checked, text, told, answers), 0)
        else:
            render = functools.partial(self._render, template, chat.tools)
            text = render(checked)
            found = self._forms.locate(render, repr(chat.tools), checked, text, answers) if answers else Located([], 0)
        if answers and not found.spans:
            raise ValueError(_NOWHERE if not template.tells else _UNTOLD)
        return Shown(text, found.spans, found.num_missing, _ends(text, checked[-1], found.spans))

    def _wanted(
        self,
        template: Compiled,
        tools: object,
        messages: Sequence[Message],
        text: str,
        told: list[Span],
        answers: Sequence[int],
    ) -> list[Span]:
        """Without the spans of answers that are not to be learnt. Raises ValueError where these are not found."""
        others = [
            index for index, message in enumerate(messages) if message["role"] == _LEARNT and index not in answers
        ]
        if not others:
            return told
        render = functools.partial(self._render, template, tools)
        unwanted = self._forms.locate(render, f"not learnt {tools!r}", messages, text, others)
        if unwanted.num_missing:
            raise ValueError(_NOWHERE)
        return [span for span in told if not any(span[0] < end and begin < span[1] for begin, end in unwanted.spans)]

    def _shows_parts(self) -> bool:
        """Whether it shows content that is a list of parts, and not the list as Python would."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._render(self._template, None, [message])
        except ValueError:
            return False
        return _PROBE in text and repr(_PROBE) not in text

    def _render(self, template: Compiled, tools: object, messages: Sequence[Message], *, prompts: bool = False) -> str:
        return self._asked(template.render, messages, tools, prompts=prompts)

    def _asked(
        self, render: Callable[..., _Text], messages: Sequence[Message], tools: object, *, prompts: bool = False
    ) -> _Text:
        try:
            return render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompts, **self._special
            )
        except self._error as error:
            raise ValueError(f"the template refuses them: {error}") from error
        except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
            raise ValueError(f"the template cannot show them: {error}") from error


def _ends(text: str, last: Message, answers: Sequence[Span]) -> bool:
    """Whether the text ends with an answer, and that with what it says: a mark of its own would stand behind it."""
    if last["role"] != _LEARNT or not answers or answers[-1][1] != len(text):
        return False
    content = last.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str) and content:
        content = content[-1].get("text") if isinstance(content[-1], Mapping) else content[-1]
    said = content.strip() if isinstance(content, str) else ""
    return bool(said) and text.rstrip().endswith(said)


def open_template(name: str, tokenizer: Tokenizer, *, sparse: bool = False) -> ChatTemplate:
    """`chatml` or `tokenizer`; `sparse` as in ChatTemplate. Raises InvalidField."""
    settings = tokenizer.settings
    special = {key: text for key in _SPECIAL if (text := token_text(settings.get(key))) is not None}
    if name == "chatml":
        return ChatTemplate(CHATML, special, sparse=sparse)
    source, with_tools = settings.get("chat_template"), None
    if isinstance(source, Sequence) and not isinstance(source, str):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
        source, with_tools = named.get("default"), named.get("tool_use")
    if not isinstance(source, str):
        raise InvalidField("data.template", name, "cannot be had: the tokenizer's folder has no chat template")
    try:
        return ChatTemplate(source, special, with_tools=with_tools, sparse=sparse)
    except ValueError as error:
        raise InvalidField("data.template", name, str(error)) from error


def _joined(index: int, message: Message) -> Message:
    """With its content as one text, for templates that know nothing of parts. Raises ValueError."""
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return message
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    for part, text in zip(content, texts, strict=True):
        if not isinstance(text, str):
            raise ValueError(f"has a message {index} with a part that the template cannot show: {show(part)}")
    return {**message, "content": "".join(texts)}
