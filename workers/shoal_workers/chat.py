"""From a list of messages to text of which only the assistant's answers are to be learnt.

A template says how a chat looks as text: `chatml`, or what a tokenizer brings along. Which part is an answer is found
by rendering twice, up to an answer and with it, so any template will do that does not change what stands before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal_planner.errors import InvalidField, show
from shoal_workers.tokenizing import Tokenizer, hash_of, token_text

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LEARNT = "assistant"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")

Part = tuple[str, bool]  # text, and whether it is to be learnt


class _Changed(ValueError):
    """The template shows earlier messages otherwise because of later ones."""


class ChatTemplate:
    """`digest` differs wherever the text of a chat may."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Raises ValueError where the template cannot be read."""
        # Templates come with tokenizers, which may come from anywhere: they get nothing to call.
        from jinja2 import TemplateError
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}`: by it a template says itself what is learnt; it shows the same without."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Parser) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        self._error = TemplateError
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"its chat template cannot be read: {error}") from error
        self._special = dict(special)
        self.digest = hash_of(f"{source} {sorted(self._special.items())}")

    def parts(self, messages: object) -> list[Part]:
        """Raises ValueError, which says what is wrong with them."""
        checked = _checked(messages)
        answers = [index for index, message in enumerate(checked) if message["role"] == _LEARNT]
        try:
            return self._parts(checked, answers)
        except _Changed:
            if len(answers) < 2:
                raise
            return self._parts(checked, answers[-1:])

    def _parts(self, checked: Sequence[Mapping[str, Any]], answers: Sequence[int]) -> list[Part]:
        """These answers are learnt. Raises _Changed where they cannot be told from what stands around them."""
        found: list[Part] = []
        before = ""
        for index in answers:
            question = self._render(checked[:index], prompts=True)
            answered = self._render(checked[: index + 1])
            if not (question.startswith(before) and answered.startswith(question)):
                raise _Changed(f"message {index} changes how the template shows those before it: no part is its answer")
            found += [(question[len(before) :], False), (answered[len(question) :], True)]
            before = answered
        whole = self._render(checked)
        if not whole.startswith(before):
            raise _Changed("what follows the last answer changes how the template shows those before it")
        found.append((whole[len(before) :], False))
        return [part for part in found if part[0]]

    def _render(self, messages: Sequence[Mapping[str, Any]], *, prompts: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=prompts, tools=None, documents=None, **self._special
            )
        except self._error as error:
            raise ValueError(f"the template refuses them: {error}") from error
        except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
            raise ValueError(f"the template cannot show them: {error}") from error


def open_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """`chatml` or `tokenizer`. Raises InvalidField."""
    settings = tokenizer.settings
    special = {key: text for key in _SPECIAL if (text := token_text(settings.get(key))) is not None}
    if name == "chatml":
        return ChatTemplate(CHATML, special)
    source = settings.get("chat_template")
    if isinstance(source, Sequence) and not isinstance(source, str):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
        source = named.get("default")
    if not isinstance(source, str):
        raise InvalidField("data.template", name, "cannot be had: the tokenizer's folder has no chat template")
    try:
        return ChatTemplate(source, special)
    except ValueError as error:
        raise InvalidField("data.template", name, str(error)) from error


def _checked(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError("is no list of messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"has as message {index} no mapping of role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"has a message {index} whose {key} is no text: {show(message.get(key))}")
    return [dict(message) for message in messages]


def _refuse(problem: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(problem)
