"""Which part of a chat is learnt, with templates that do what those of well-known models do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
import transformers
from chat_templates import ALPACA, GEMMA, LLAMA2, LLAMA3, MISTRAL, QWEN3, QWEN25, R1, TOLD
from data_ground import job, write_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal_planner.data_spec import DataSpec
from shoal_workers.answers import Forms
from shoal_workers.chat import CHATML, ChatTemplate, Shown, open_template
from shoal_workers.data import training_samples
from shoal_workers.documents import Encoder, Raw
from shoal_workers.errors import DataError
from shoal_workers.template_environment import compiled
from shoal_workers.tokenizing import open_tokenizer

Chat = Sequence[Mapping[str, Any]]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def chat(form: str) -> Chat:
    """Of a letter for each message: what who says is that letter and its number."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[letter], "content": f" {letter}{index}\n"} for index, letter in enumerate(form)]


def show(source: str, messages: Chat, tools: object = None) -> Shown:
    return ChatTemplate(source, SPECIAL).show(messages, tools)


def learnt(source: str, messages: Chat, tools: object = None) -> list[str]:
    shown = show(source, messages, tools)
    assert shown.num_missing == 0
    return [shown.text[begin:end] for begin, end in shown.answers]


EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("source", "form", "wanted"),
    [
        (QWEN25, "suaua", [" a2\n<|im_end|>\n", " a4\n<|im_end|>\n"]),
        (QWEN25, "auau", [" a0\n<|im_end|>\n", " a2\n<|im_end|>\n"]),
        (QWEN25, "uaaa", [" a1\n<|im_end|>\n", " a2\n<|im_end|>\n", " a3\n<|im_end|>\n"]),
        (QWEN3, "uaua", [" a1\n<|im_end|>\n", f"{EMPTY} a3\n<|im_end|>\n"]),
        (QWEN3, "suauau", [" a2\n<|im_end|>\n", " a4\n<|im_end|>\n"]),
        (QWEN3, "uaa", [" a1\n<|im_end|>\n", f"{EMPTY} a2\n<|im_end|>\n"]),
        (QWEN3, "aua", [" a0\n<|im_end|>\n", f"{EMPTY} a2\n<|im_end|>\n"]),
        (QWEN3, "a", [" a0\n<|im_end|>\n"]),
        (LLAMA2, "suaua", [" a2 </s>", " a4 </s>"]),
        (LLAMA2, "uau", [" a1 </s>"]),
        (LLAMA3, "suaua", ["a2<|eot_id|>", "a4<|eot_id|>"]),
        (LLAMA3, "auau", ["a0<|eot_id|>", "a2<|eot_id|>"]),
        (MISTRAL, "suaua", [" a2</s>", " a4</s>"]),
        (MISTRAL, "suau", [" a2</s>"]),
        (R1, "suaua", [" a2\n</s>", " a4\n</s>"]),
        (R1, "uaua", [" a1\n</s>", " a3\n</s>"]),
        (GEMMA, "uauau", ["a1<end_of_turn>\n", "a3<end_of_turn>\n"]),
        (ALPACA, "suaua", [" a2\n", " a4\n"]),
        (TOLD, "suaauu", [" a2\n<|im_end|>", " a3\n<|im_end|>"]),
        (CHATML, "auaau", [f" a{index}\n<|im_end|>\n" for index in (0, 2, 3)]),
    ],
)
def test_answers_are_learnt_with_what_ends_them(source: str, form: str, wanted: list[str]) -> None:
    assert learnt(source, chat(form)) == wanted


@pytest.mark.parametrize("source", [LLAMA2, MISTRAL, GEMMA])
def test_what_a_template_refuses_it_says_itself(source: str) -> None:
    with pytest.raises(ValueError, match="the template refuses them: turns must alternate"):
        show(source, chat("aua"))


CALL = {"type": "function", "function": {"name": "tide", "arguments": {"at": 'the "sea"', "h": 3}}}
CALLED = '<tool_call>\n{"name": "tide", "arguments": {"at": "the \\"sea\\"", "h": 3}}\n</tool_call>'
CALLING = [
    {"role": "user", "content": "How high is it?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "2 m"},
    {"role": "tool", "content": "3 m"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2 m"},
    {"role": "assistant", "content": "Two metres."},
]


@pytest.mark.parametrize("tools", [None, [CALL]])
@pytest.mark.parametrize("source", [QWEN25, QWEN3, CHATML])
def test_calls_are_learnt(source: str, tools: object) -> None:
    first, second, third = learnt(source, CALLING, tools)
    assert first == f"I look.\n{CALLED}\n{CALLED}<|im_end|>\n"
    assert second.lstrip("\n") == f"{CALLED}<|im_end|>\n"
    assert third == (EMPTY if source == QWEN3 else "") + "Two metres.<|im_end|>\n"


def test_what_was_thought_is_learnt_where_it_is_shown() -> None:
    thinking = [{**one, "content": f"<think>\nwhy{one['content']}\n</think>\n\nso"} for one in chat("uaua")]
    for index in (0, 2):
        thinking[index] = chat("uaua")[index]
    assert learnt(QWEN3, thinking) == [
        "so<|im_end|>\n",
        "<think>\nwhy a3\n</think>\n\nso<|im_end|>\n",
    ]
    assert learnt(R1, thinking) == ["\n\nso</s>", "\n\nso</s>"]
    silent = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "<think>\nwhy\n</think>\n\n"}]
    assert learnt(QWEN3, silent) == ["<think>\nwhy\n</think>\n\n<|im_end|>\n"]
    assert learnt(R1, silent) == ["\n\n</s>"]
    apart = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "so", "reasoning_content": "why"}]
    assert learnt(QWEN3, apart) == ["<think>\nwhy\n</think>\n\nso<|im_end|>\n"]
    assert learnt(CHATML, apart) == ["<think>\nwhy\n</think>\n\nso<|im_end|>\n"]


def test_chats_of_one_form_are_rendered_once_each() -> None:
    rendered: list[int] = []

    def render(messages: Chat, *, prompts: bool = False) -> str:
        rendered.append(len(messages))
        return "".join(f"[{one['role']}]{one['content'].strip()}" for one in messages) + "[assistant]" * prompts

    known = Forms()
    for number in range(20):
        messages = [{**one, "content": f"{one['content']} {number}"} for one in chat("suauau")]
        text = render(messages)
        found = known.locate(render, "", messages, text, [2, 4])
        assert [text[begin:end] for begin, end in found.spans] == [f"a2\n {number}", f"a4\n {number}"]
    assert len(rendered) == 20 + 1 + 2 * 2
    assert min(rendered) > 0


def test_chats_with_calls_are_of_one_form_whatever_is_called() -> None:
    rendered: list[int] = []
    template = compiled(QWEN3)

    def render(messages: Chat, *, prompts: bool = False) -> str:
        rendered.append(len(messages))
        return template.render(messages=messages, add_generation_prompt=prompts)

    known = Forms()
    for number in range(10):
        arguments: list[Any] = [{"at": [f'the "{number}"', {"ö": "\n"}], "h": 3}, f'{{"at": "{number}"}}']
        calls = [
            {"id": f"{number}{at}", "function": {"name": f"f{number}", "arguments": arguments[at]}} for at in (0, 1)
        ]
        messages = [
            {"role": "user", "content": f"u{number}"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": f"t{number}", "tool_call_id": f"{number}0"},
            {"role": "assistant", "content": f"a{number}"},
        ]
        text = render(messages)
        first, second = known.locate(render, "", messages, text, [1, 3]).spans
        assert json.loads(text[slice(*first)].split("\n")[1])["arguments"] == arguments[0]
        assert text[slice(*first)].endswith(f'"arguments": {{"at": "{number}"}}}}\n</tool_call><|im_end|>\n')
        assert text[slice(*second)] == f"{EMPTY}a{number}<|im_end|>\n"
    assert len(rendered) == 10 + 1 + 2 * 2


@pytest.mark.parametrize("source", [QWEN25, QWEN3, LLAMA2, LLAMA3, MISTRAL, R1, GEMMA, ALPACA])
@given(said=st.lists(st.text(alphabet="ab<>/ \n\\\"'{ö\ud83d", max_size=12), min_size=6, max_size=6))
@settings(max_examples=40, deadline=None)
def test_whatever_is_said_is_found(source: str, said: list[str]) -> None:
    messages = [{**one, "content": text} for one, text in zip(chat("uauaua"), said, strict=True)]
    found = learnt(source, messages)
    assert len(found) == 3
    for index, answer in enumerate(found):
        assert said[2 * index + 1].strip() in answer


def test_of_a_template_that_changes_what_is_said_its_beginnings_are_compared() -> None:
    source = CHATML.replace("{{- text(message.content) }}", "{{- text(message.content) | upper }}")
    assert source != CHATML
    assert learnt(source, chat("suaua")) == [" A2\n<|im_end|>\n", " A4\n<|im_end|>\n"]
    assert learnt(CHATML, [{"role": "user", "content": "q8Zxj0000"}, *chat("ua")[1:]]) == [" a1\n<|im_end|>\n"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "small")


def with_template(folder: Path, to: Path, source: str) -> Path:
    to.mkdir()
    (to / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": source}))
    return to


_SAID = st.text(alphabet="the soal\n.ö{", max_size=20)


@given(
    said=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), _SAID), min_size=1, max_size=8),
    tight=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_a_template_tells_is_what_transformers_masks(
    folder: Path, said: list[tuple[str, str]], tight: bool
) -> None:
    """Tight: nothing stands before an answer that keeps its first token apart."""
    source = TOLD.replace("m.role ~ '\\n'", "m.role") if tight else TOLD
    messages = [{"role": role, "content": text} for role, text in said]
    library = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    theirs = library.apply_chat_template(
        messages, chat_template=source, return_assistant_tokens_mask=True, return_dict=True
    )
    tokenizer = open_tokenizer(str(folder), None, 512)
    (ours,) = Encoder(tokenizer, ChatTemplate(source, {})).encode([Raw(messages, 0, "f", "line 1")])
    assert ours.ids.tolist() == [*theirs["input_ids"], tokenizer.end]
    assert ours.learnt.tolist() == [*map(bool, theirs["assistant_masks"]), False]


def test_a_template_that_tells_nothing_of_an_answer_is_refused() -> None:
    source = TOLD.replace("m.role == 'assistant'", "m.role == 'model'")
    with pytest.raises(ValueError, match="has answers, none of which the template shows within"):
        show(source, chat("ua"))
    assert show(source, chat("su")).answers == []


@pytest.mark.parametrize("source", [QWEN25, LLAMA3, ALPACA, TOLD], ids=["qwen2.5", "llama-3", "alpaca", "told"])
def test_answers_of_no_weight_are_not_learnt_whatever_finds_them(source: str) -> None:
    """Also by one template that has seen the same chat with other weights."""
    template = ChatTemplate(source, SPECIAL)

    def said(*weights: int) -> list[str]:
        given = iter(weights)
        weighed = [{**each, "weight": next(given)} if each["role"] == "assistant" else each for each in chat("uaua")]
        shown = template.show(weighed)
        assert shown.num_missing == 0
        return ["".join(shown.text[begin:end].split())[:2] for begin, end in shown.answers]

    assert said(1, 1) == ["a1", "a3"]
    assert said(0, 1) == ["a3"]
    assert said(1, 0) == ["a1"]
    assert said(0, 0) == []


def test_tags_within_a_macro_tell_the_same() -> None:
    source = TOLD.replace(
        "{%- for m", "{%- macro say(m) %}{% generation %}{{ m.content }}!{% endgeneration %}{% endmacro %}{%- for m"
    )
    source = source.replace("{% generation %}{{ m.content }}{{ '<|im_end|>' }}{% endgeneration %}", "{{ say(m) }}")
    assert learnt(source, chat("uaua")) == [" a1\n!", " a3\n!"]


@pytest.mark.parametrize(
    ("source", "form", "ends"), [(ALPACA, "uaua", True), (ALPACA, "uau", False), (CHATML, "ua", False)]
)
def test_the_end_is_learnt_where_nothing_else_ends_the_last_answer(
    folder: Path, tmp_path: Path, source: str, form: str, ends: bool
) -> None:
    tokenizer = open_tokenizer(str(with_template(folder, tmp_path / "own", source)), None, 512)
    (found,) = Encoder(tokenizer, open_template("tokenizer", tokenizer)).encode([Raw(chat(form), 0, "f", "line 1")])
    assert found.ids[-1] == tokenizer.end
    assert bool(found.learnt[-1]) == ends


def test_answers_that_are_not_found_are_spoken_of(folder: Path) -> None:
    source = "{% for m in messages %}{% if not loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    encoder = Encoder(open_tokenizer(str(folder), None, 512), ChatTemplate(source, {}))
    raw = Raw(chat("auaa"), 0, "a.jsonl", "line 3")
    with structlog.testing.capture_logs() as logs:
        (found, _) = encoder.encode([raw, raw])
    assert found.learnt.any()
    (said,) = logs
    assert (said["log_level"], said["file"], said["where"], said["num_answers"]) == ("warning", "a.jsonl", "line 3", 1)


def test_a_chat_whose_answers_are_not_found_is_named(folder: Path, tmp_path: Path) -> None:
    hides = "{% for m in messages %}{% if m.content != 'hidden' %}{{ m.content }}{% endif %}{% endfor %}"
    path = with_template(folder, tmp_path / "own", hides)
    rows = [chat("ua"), [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hidden"}], chat("ua")]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": one}) for one in rows))
    data = DataSpec(uri=(tmp_path / "a.jsonl").as_uri(), format="jsonl", template="tokenizer", tokenizer=str(path))
    with pytest.raises(DataError, match=r"a\.jsonl line 2: .* has answers, none of which can be told"):
        training_samples(job(data, batch=1)).read(range(20))
