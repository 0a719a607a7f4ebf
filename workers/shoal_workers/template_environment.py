"""What a chat template may use: what Hugging Face transformers gives it, so that it shows a chat as it does there.

Owns filters, functions and tags. Templates come with tokenizers, which may come from anywhere: they get nothing of the
machine to call. Jinja is loaded when there is a template to read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

# What a template that asks for the date is told, on any day: samples would differ from one day to the next. Templates
# that know a date of their own for where there is none have this one.
_DAY = datetime(2024, 7, 26)


@dataclass(slots=True)
class _Rendering:
    """What stands there so far, and what was said since within `{% generation %}`: where at the earliest, and what."""

    num_chars: int = 0
    said: list[tuple[int, str]] = field(default_factory=list)


_RENDERING: ContextVar[_Rendering] = ContextVar("rendering")  # threads show chats with one template at a time


@dataclass(frozen=True, slots=True)
class Compiled:
    """`tells`: it has `{% generation %}`, around all that is to be learnt."""

    template: Any
    tells: bool

    def render(self, **values: Any) -> str:
        """Raises jinja2.TemplateError, and what the template's own expressions do."""
        return str(self.template.render(**values))

    def render_told(self, **values: Any) -> tuple[str, list[tuple[int, int]]]:
        """With the characters [begin, end) that stand within the tags. Raises what `render` does."""
        rendering, parts = _Rendering(), list[str]()
        before = _RENDERING.set(rendering)
        try:
            for part in self.template.generate(**values):
                parts.append(part)
                rendering.num_chars += len(part)
        finally:
            _RENDERING.reset(before)
        text = "".join(parts)
        found = []
        for earliest, said in rendering.said:  # within a macro it stands somewhat later, or, if it is dropped, nowhere
            begin = text.find(said, earliest)
            if begin >= 0:
                found.append((begin, begin + len(said)))
        return text, found


def compiled(source: str) -> Compiled:
    """A Jinja template. Raises jinja2.TemplateError where it cannot be read."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}`, around what a model says: it shows the same without, in a scope of its own."""

        tags = {"generation"}  # noqa: RUF012
        used = False

        def parse(self, parser: Parser) -> nodes.Node:
            Generation.used = True
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

        def _show(self, caller: Any) -> Any:
            text = caller()
            if (rendering := _RENDERING.get(None)) is not None:
                rendering.said.append((rendering.num_chars, str(text)))
            return text

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def namespace(*values: Any, **named: Any) -> Namespace:
        found = dict(*values, **named)
        if hidden := next((name for name in found if name.startswith("_")), None):
            raise SecurityError(f"a namespace takes no name that begins with an underscore: {hidden!r}")
        return Namespace(found)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=refuse, strftime_now=_DAY.strftime, namespace=namespace, dict=_Dictionaries()
    )
    template = environment.from_string(source)
    return Compiled(template, Generation.used)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """In place of Jinja's own, which is for web pages: it escapes what HTML would mind, and sorts."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dictionaries:
    """`dict` as templates call it, without what else hangs on the type."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)
