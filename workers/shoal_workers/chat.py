"""From a conversation to text of which only the assistant's answers are to be learnt.

A template says how a chat looks as text: `chatml`, or what a tokenizer brings along. Which part is an answer is found
by rendering twice, up to an answer and with it, so any template will do that does not change what stands before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal_planner.errors import InvalidField, show
from shoal_workers.conversations import Message, conversation
from shoal_workers.template_environment import compiled
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

Part = tuple[str, bool]  # text, and whether it is to be learnt


class _Changed(ValueError):
    """The template shows earlier messages otherwise because of later ones."""


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
        self._takes_parts = self._shows_parts()
        self.digest = hash_of(f"{source} {with_tools} {sparse} {sorted(self._special.items())}")

    def parts(self, messages: object, tools: object = None) -> list[Part]:
        """Raises ValueError, which says what is wrong with them."""
        chat = conversation(messages, tools, sparse=self._sparse)
        checked = chat.messages if self._takes_parts else [_joined(*one) for one in enumerate(chat.messages)]
        answers = [
            index for index, message in enumerate(checked) if message["role"] == _LEARNT and message.get("weight", 1)
        ]
        try:
            return self._parts(checked, chat.tools, answers)
        except _Changed:
            if len(answers) < 2:
                raise
            return self._parts(checked, chat.tools, answers[-1:])

    def _shows_parts(self) -> bool:
        """Whether it shows content that is a list of parts, and not the list as Python would."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._render([message], None)
        except ValueError:
            return False
        return _PROBE in text and repr(_PROBE) not in text

    def _parts(self, checked: Sequence[Message], tools: object, answers: Sequence[int]) -> list[Part]:
        """These answers are learnt. Raises _Changed where they cannot be told from what stands around them."""
        found: list[Part] = []
        before = ""
        for index in answers:
            question = self._render(checked[:index], tools, prompts=True)
            answered = self._render(checked[: index + 1], tools)
            if not (question.startswith(before) and answered.startswith(question)):
                raise _Changed(f"message {index} changes how the template shows those before it: no part is its answer")
            found += [(question[len(before) :], False), (answered[len(question) :], True)]
            before = answered
        whole = self._render(checked, tools)
        if not whole.startswith(before):
            raise _Changed("what follows the last answer changes how the template shows those before it")
        found.append((whole[len(before) :], False))
        return [part for part in found if part[0]]

    def _render(self, messages: Sequence[Message], tools: object, *, prompts: bool = False) -> str:
        template = self._template if tools is None else self._with_tools
        try:
            text: str = template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompts, **self._special
            )
            return text
        except self._error as error:
            raise ValueError(f"the template refuses them: {error}") from error
        except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
            raise ValueError(f"the template cannot show them: {error}") from error


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
