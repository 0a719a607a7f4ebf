"""Where in the text of a chat the answers stand.

What a template makes of a chat is known once it has shown one with marks in place of the texts: what it writes around
them. Where the text of a chat is that, with its own texts in these places, so are its answers. Templates do the same
with chats of the same form, so that is found out once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from shoal_workers.chat_marks import Mark, forms, marked, may_mark, split
from shoal_workers.conversations import Message

Render = Callable[..., str]  # of messages, and `prompts`; raises ValueError
Span = tuple[int, int]  # characters [begin, end)

_MOST_KNOWN = 512
_LONGEST_KEY = 2**14


class Located(NamedTuple):
    """Spans in order, and how many of the answers have none."""

    spans: list[Span]
    num_missing: int


class _Run(NamedTuple):
    """Marks of one answer beside each other, and how many characters before and behind them are its own."""

    first: int
    last: int
    lead: int
    tail: int


class _Form(NamedTuple):
    """What a template writes around marks (`around`, one more than these), their numbers, and the answers."""

    around: list[str]
    numbers: list[int]
    runs: list[_Run]
    num_missing: int


class Forms:
    """The forms that were found, of one template."""

    def __init__(self) -> None:
        self._known: dict[str, _Form] = {}

    def locate(
        self, render: Render, key: str, messages: Sequence[Message], text: str, answers: Sequence[int]
    ) -> Located:
        """Of the answers among `messages` in `text`, which is these as they are rendered. `key` stands for what else
        decides that. Raises ValueError."""
        if may_mark(text):
            # The first finds the form known that many chats have; of the second what others say is a part.
            for which in (range(len(messages)), answers):
                found = self._by_marks(render, key, messages, text, which, answers)
                if found is not None and found.spans:
                    return found
        return _by_beginnings(render, messages, text, answers)

    def _by_marks(
        self,
        render: Render,
        key: str,
        messages: Sequence[Message],
        text: str,
        which: Collection[int],
        answers: Sequence[int],
    ) -> Located | None:
        shown = marked(messages, which)
        if shown is None:
            return None
        name = f"{key} {shown.messages}"
        form = self._known.get(name)
        if form is None:
            form = _form(render, shown.messages, shown.marks, answers)
            if form is not None and len(name) <= _LONGEST_KEY:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[name] = form
        places = None if form is None else _places(text, form, shown.marks)
        if form is None or places is None:
            return None
        spans = [(places[run.first][0] - run.lead, places[run.last][1] + run.tail) for run in form.runs]
        return Located(spans, form.num_missing)


def _form(render: Render, messages: Sequence[Message], marks: Sequence[Mark], answers: Sequence[int]) -> _Form | None:
    """None: the template does not show such messages."""
    try:
        around, numbers = split(render(messages))
    except ValueError:
        return None
    if any(number >= len(marks) for number in numbers):
        return None
    owners = [marks[number].message for number in numbers]
    ends = {index: _behind(render, messages[: index + 1]) for index in answers}
    known = next((end for end in ends.values() if end), "")
    runs = []
    for first, last in _runs(owners, answers):
        index = owners[first]
        asked = _behind(render, messages[:index], prompts=True) if index else None
        before, behind, end = around[first], around[last + 1], ends[index]
        # The model is asked for what stands behind the question; where that is not seen, what it thinks is the first.
        lead = len(before) - len(asked) if asked is not None and before.startswith(asked) else 0
        runs.append(_Run(first, last, lead, _common(behind, known if end is None else end)))
    return _Form(around, numbers, runs, len(set(answers) - set(owners)))


def _runs(owners: Sequence[int], answers: Collection[int]) -> Iterable[tuple[int, int]]:
    """The first and the last of the marks that stand beside each other and are of the same answer."""
    first = 0
    for index, owner in enumerate(owners):
        if index + 1 == len(owners) or owners[index + 1] != owner:
            if owner in answers:
                yield first, index
            first = index + 1


def _behind(render: Render, messages: Sequence[Message], *, prompts: bool = False) -> str | None:
    """What stands behind the last mark where these are all; None where the template refuses them."""
    try:
        return split(render(messages, prompts=prompts))[0][-1]
    except ValueError:
        return None


def _places(text: str, form: _Form, marks: Sequence[Mark]) -> list[Span] | None:
    """What the marks stand for, in order; None where that and what is around it do not make the text."""
    if not text.startswith(form.around[0]):
        return None
    found: list[Span] = []
    begin = len(form.around[0])
    for number, behind in zip(form.numbers, form.around[1:], strict=True):
        for shown in forms(marks[number].text):
            end = begin + len(shown)
            if text.startswith(shown, begin) and text.startswith(behind, end):
                break
        else:
            return None
        found.append((begin, end))
        begin = end + len(behind)
    return found if begin == len(text) else None


def _by_beginnings(render: Render, messages: Sequence[Message], text: str, answers: Sequence[int]) -> Located:
    """Of a template that changes what is said: what it adds when an answer is added to the messages before it, where
    it shows these as it does in the end."""
    spans: list[Span] = []
    for index in answers:
        if not index:  # there are no messages before it, and a template may count on some
            continue
        try:
            asked = render(messages[:index], prompts=True)
            answered = render(messages[: index + 1])
        except ValueError:
            continue
        if text.startswith(answered) and answered.startswith(asked) and len(asked) < len(answered):
            spans.append((len(asked), len(answered)))
    return Located(spans, len(answers) - len(spans))


def _common(one: str, other: str) -> int:
    """How many characters they begin with together."""
    most = min(len(one), len(other))
    return next((at for at in range(most) if one[at] != other[at]), most)
